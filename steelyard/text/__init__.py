"""Raw text and tokenizers: reading corpora, training and loading tokenizers."""
