from areal_like.run import Run as Run
from areal_like.run import train as train
