"""Token files and the training samples in them. Reading them needs numpy only, no tokenizer and no torch."""
