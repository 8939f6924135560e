"""Certificates (docs/models.md): a small copy of a model is trained and pushed, and compared with transformers in
float32 on the CPU.
"""
