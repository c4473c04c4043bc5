"""`python -m jaxmoe.demo`: trains a small Mixture-of-Experts language model on the source of Python's standard library.

`__main__.py` is the command line and `run.py` the demo from top to bottom; below them, in the order of their use:

- `interrupt.py`: Ctrl-C
- `options.py`: sizes of the run, and the devices it gets
- `data.py`: the bytes to train on and those held out
- `model.py`: attention and `jaxmoe.nnx.MoE` blocks
- `train.py`: one jitted step, the loop, the held-out loss
- `sample.py`: text from the trained model
- `compare.py`: the trained layers against the dense reference
- `report.py`: what is printed
- `plots.py`: what is drawn
"""
