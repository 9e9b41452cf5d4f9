"""Token files and the training samples cut from them. Numpy only: no tokenizer and no torch comes in here."""
