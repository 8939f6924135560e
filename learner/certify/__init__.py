"""Certificates (docs/models.md): small copies of models are compared with transformers on the CPU."""
