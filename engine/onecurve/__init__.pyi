# The Trainer, and what it takes
from .run.trainer import Trainer as Trainer
from .data.ordered_data import OrderedData as OrderedData
from .parallel.ddp import DDP as DDP
from .parallel.fsdp import FSDP as FSDP
from .parallel.pipeline.pipeline import Pipeline as Pipeline
from .optim.muon import muon as muon
from .run.ema import EMA as EMA

# train.py
from .application import main as main
from .run.experiment import build_module as build_module
from .run.experiment import build_trainer as build_trainer

# Training from Python
from .notebook import compose as compose
from .notebook import train as train
from .run.result import Result as Result
from .targets import build as build
from .run.trained import load_run as load_run

# Data: batches that no hardware changes
from .data.batch import Batch as Batch
from .data.layout import BatchLayout as BatchLayout
from .data.layout import partners as partners

# Random numbers by hashes of seed, epoch and sample
from .random.hashing import hash_ints as hash_ints
from .random.hashing import integers as integers
from .random.hashing import normal as normal
from .random.hashing import permutation as permutation
from .random.hashing import uniform as uniform

# LightningModules and networks
from .random.dropout import DropPath as DropPath
from .network.recomputation import recompute_blocks as recompute_blocks
from .run.module import Module as Module
from .run.module import WeightedMean as WeightedMean
from .checkpoint.io import check_fits as check_fits
from .network.tensors import upcast_half as upcast_half

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
from .network.compilation import GRAPH_MODES as GRAPH_MODES
from .network.compilation import check_compile_mode as check_compile_mode
from .network.compilation import compile_blocks as compile_blocks
from .network.compilation import compiled as compiled
from .network.compilation import device_constant as device_constant
from .network.compilation import should_compile as should_compile

# Errors and files
from .errors import CheckpointUserError as CheckpointUserError
from .errors import DivergedUserError as DivergedUserError
from .errors import UserError as UserError
from .errors import check_choice as check_choice
from .records.files import atomic_write as atomic_write
from .records.files import file_lock as file_lock
