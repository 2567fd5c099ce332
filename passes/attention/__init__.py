"""Attention: `find_attention` names each and decides, `quantize_attention` rewrites at the end of the pipeline."""
