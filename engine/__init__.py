"""SkipDecode generation on one device: torch and transformers only, no Ray, no storage. Its public face."""

from engine.checkpoints.checkpoint import check_files as check_model_files
from engine.checkpoints.checkpoint import check_weights as check_model_weights
from engine.checkpoints.checkpoint import differences as model_differences
from engine.checkpoints.checkpoint import files as model_files
from engine.checkpoints.checkpoint import identity as model_identity
from engine.checkpoints.checkpoint import prepare as checkpoint_directory
from engine.checkpoints.checkpoint import resolve as pinned_model
from engine.checkpoints.tokenizer import Tokenizer
from engine.decoding.early_exit import EarlyExit
from engine.decoding.feeding import Decoding
from engine.decoding.generation import Generation, sample_name
from engine.decoding.sampling import Sampling
from engine.decoding.stats import BatchStats
from engine.engine import Engine, describe, resolve_device, resolve_dtype
from engine.errors import ModelError, PromptError, ScheduleError, StreamLost, brief
from engine.forward.ledger import Ledger
from engine.forward.quality import AnswerScore, Scores
from engine.forward.target import decode_flop_speedup, for_target_speedup
from engine.json_text import check_is_file, parse_json, read_json
from engine.parts.bridge import Bridge
from engine.parts.head_preview import HeadPreview
from engine.parts.prompt_bridge import PromptBridge
from engine.parts.unit import Block, Unit
from engine.schedules.schedule import Plateau, Schedule
from engine.shape import ModelShape

__version__ = "0.1.0"
