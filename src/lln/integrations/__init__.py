"""Where other libraries meet LLN attention: Hugging Face transformers and timm.

Nothing here is imported by ``import lln``; each module imports its library when it is imported:

    from lln.integrations.transformers import register
    from lln.integrations.convert import convert
"""

NEEDS_TRANSFORMERS = "Hugging Face models need transformers; pip install 'lln[hf]'."
