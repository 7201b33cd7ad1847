"""SkipDecode generation on one device: torch and transformers only, no Ray, no storage."""

from engine.batch import BatchStats
from engine.bridge import Bridge
from engine.checkpoint import check_files as check_model_files
from engine.checkpoint import check_weights as check_model_weights
from engine.checkpoint import differences as model_differences
from engine.checkpoint import files as model_files
from engine.checkpoint import identity as model_identity
from engine.checkpoint import prepare as checkpoint_directory
from engine.checkpoint import resolve as pinned_model
from engine.early_exit import EarlyExit
from engine.engine import Engine, describe, resolve_device, resolve_dtype
from engine.errors import ModelError, PromptError, ScheduleError, brief
from engine.flops import Ledger
from engine.generation import Generation
from engine.head_preview import HeadPreview
from engine.json_text import check_is_file, parse_json, read_json
from engine.prompt_bridge import PromptBridge
from engine.sampling import Sampling
from engine.schedule import Plateau, Schedule
from engine.scoring import AnswerScore
from engine.shape import ModelShape
from engine.target import decode_flop_speedup, for_target_speedup
from engine.tokenizer import Tokenizer
from engine.unit import Block, Unit

__all__ = [
    "AnswerScore",
    "BatchStats",
    "Block",
    "Bridge",
    "EarlyExit",
    "Engine",
    "Generation",
    "HeadPreview",
    "Ledger",
    "ModelError",
    "ModelShape",
    "Plateau",
    "PromptBridge",
    "PromptError",
    "Sampling",
    "Schedule",
    "ScheduleError",
    "Tokenizer",
    "Unit",
    "brief",
    "check_is_file",
    "check_model_files",
    "check_model_weights",
    "checkpoint_directory",
    "decode_flop_speedup",
    "describe",
    "for_target_speedup",
    "model_differences",
    "model_files",
    "model_identity",
    "parse_json",
    "pinned_model",
    "read_json",
    "resolve_device",
    "resolve_dtype",
]

__version__ = "0.1.0"
