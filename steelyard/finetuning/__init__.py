"""Fine-tuning on conversations and preferences: dataset formats, chat templates, packing, LoRA, DPO and NEFTune."""
