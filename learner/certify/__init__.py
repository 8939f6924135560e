"""The certificate (docs/models.md): a small copy of a model is trained and pushed as a run does, and compared in
float32 on the CPU."""
