"""droidkv: let several fine-tunes of one base model reuse one another's KV cache."""

__version__ = "0.1.0"
