"""The certificate (docs/models.md): a small copy of a model is compared with transformers in float32 on the CPU."""
