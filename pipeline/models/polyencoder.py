"""The former name of `pipeline.models.heads`, which still imports."""

from pipeline.models.heads import first_m_vectors, learnt_code_vectors, poly_scores

__all__ = ["first_m_vectors", "learnt_code_vectors", "poly_scores"]
