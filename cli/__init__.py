"""The `droidkv` command; installed as `droidkv.cli`."""
