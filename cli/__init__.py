"""The `droidkv` command; installed as `droidkv.cli`. Nothing heavy is imported at its start."""
