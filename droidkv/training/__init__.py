"""Training receivers: ordinary fine-tunes, and those that read a frozen base's KV."""
