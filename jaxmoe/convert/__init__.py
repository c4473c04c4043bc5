"""From the checkpoints that people have to the weights of a layer, and back.

    weights = jaxmoe.convert.from_hf("Qwen3-30B-A3B", "qwen3_moe", layer=0, mesh=mesh)
    tensors = jaxmoe.convert.to_hf(weights, "qwen3_moe", layer=0)

Reading order: `families.py` (the names), `matrices.py` (how a matrix lies) and `gpt_oss.py`, `safetensors_files.py`
(files as a mapping), `tensors.py` (what is checked), `placing.py` (one shard at a time), `loading.py`,
`checks.py` (experts that go together), `saving.py`.
"""

from jaxmoe.convert.loading import from_hf
from jaxmoe.convert.safetensors_files import SafetensorsFiles, open_safetensors
from jaxmoe.convert.saving import to_hf
from jaxmoe.convert.weights import MoEWeights

__all__ = ["MoEWeights", "SafetensorsFiles", "from_hf", "open_safetensors", "to_hf"]
