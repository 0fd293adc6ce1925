# A Trainer of Lightning for any project, and the strategies that do not only have a name
from .run.trainer import Trainer as Trainer
from .determinism.ordered_data import OrderedData as OrderedData
from .parallel.ddp import DDP as DDP
from .parallel.fsdp import FSDP as FSDP
from .parallel.pipeline.pipeline import Pipeline as Pipeline
from .optim.muon import Muon as Muon
from .run.ema import EMA as EMA

# train.py
from .application import main as main
from .run.experiment import build_module as build_module
from .run.experiment import build_trainer as build_trainer

# Training from Python
from .notebook import Result as Result
from .notebook import compose as compose
from .notebook import train as train
from .utils.targets import build as build
from .run.trained import load_run as load_run

# Data: batches that no hardware changes
from .determinism.batch import Batch as Batch
from .determinism.layout import BatchLayout as BatchLayout
from .determinism.layout import partners as partners

# Random numbers by hashes of seed, epoch and sample
from .determinism.hashing import hash_ints as hash_ints
from .determinism.hashing import integers as integers
from .determinism.hashing import normal as normal
from .determinism.hashing import permutation as permutation
from .determinism.hashing import uniform as uniform

# LightningModules and networks
from .determinism.dropout import DropPath as DropPath
from .determinism.recomputation import recompute_blocks as recompute_blocks
from .run.module import Module as Module
from .run.module import WeightedMean as WeightedMean
from .state.io import check_fits as check_fits
from .utils.tensors import upcast_half as upcast_half

# Optimizers and schedules
from .optim.groups import build_optimizer as build_optimizer
from .optim.groups import scaling_factor as scaling_factor
from .optim.schedules import keep_configured_rates as keep_configured_rates
from .optim.schedules import override_hyperparameters as override_hyperparameters
from .optim.schedules import scheduler_config as scheduler_config

# Strategies
from .parallel.gradients import average_over as average_over
from .parallel.sharded_state import ShardedStateStrategy as ShardedStateStrategy

# Compilation
from .utils.compilation import GRAPH_MODES as GRAPH_MODES
from .utils.compilation import check_compile_mode as check_compile_mode
from .utils.compilation import compile_blocks as compile_blocks
from .utils.compilation import compiled as compiled
from .utils.compilation import device_constant as device_constant
from .utils.compilation import should_compile as should_compile

# Errors and files
from .utils.errors import CheckpointUserError as CheckpointUserError
from .utils.errors import DivergedUserError as DivergedUserError
from .utils.errors import UserError as UserError
from .utils.errors import check_choice as check_choice
from .utils.files import atomic_write as atomic_write
from .utils.files import file_lock as file_lock
