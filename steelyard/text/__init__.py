"""Raw text and tokenizers: read corpora, train and load tokenizers."""
