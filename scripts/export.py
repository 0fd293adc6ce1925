"""Export the trained network of a run, with its normalization, for programs without this project.

The exported program maps uint8 images (n, channels, height, width) to probabilities (n, classes), for any n. Before its
file is written, its output is compared with that of the network.

  torch   a .pt2 file for torch alone: torch.export.load(FILE).module()(images)
  onnx    an .onnx file for ONNX Runtime and others; the export needs pip install '.[onnx]'
"""

import argparse
import io
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onecurve.errors import UserError
from onecurve.records.files import atomic_write
from onecurve.run.trained import Predictor, load_run

_SUFFIXES = {"torch": ".pt2", "onnx": ".onnx"}
_TOLERANCE = 1e-4  # of a probability; other kernels round differently


def export(predictor: Predictor, image_shape: list[int], file_format: str) -> bytes:
    """Return the content of a file with the predictor as an exported program.

    Args:
        predictor: the network with its normalization.
        image_shape: (channels, height, width) of its images.
        file_format: `torch` or `onnx`.
    """
    # Strict, because otherwise `len(images)` in a network would fix the number of images.
    program = torch.export.export(
        predictor,
        (_random_images(2, image_shape),),
        dynamic_shapes={"images": {0: torch.export.Dim("n")}},
        strict=True,
    )
    content, load = (_to_pt2(program), _load_pt2) if file_format == "torch" else (_to_onnx(program), _load_onnx)
    _check_output(load(content), predictor, image_shape)
    return content


def _random_images(count: int, image_shape: list[int]) -> Tensor:
    return torch.randint(0, 256, (count, *image_shape), dtype=torch.uint8)


def _to_pt2(program: Any) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def _load_pt2(content: bytes) -> Callable[[Tensor], Tensor]:
    return torch.export.load(io.BytesIO(content)).module()


def _to_onnx(program: Any) -> bytes:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that torchvision is not installed
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["probabilities"]}
    try:
        exported = torch.onnx.export(program, dynamo=True, dynamic_shapes={"images": {0: "n"}}, verbose=False, **names)
    except ModuleNotFoundError as error:
        raise UserError(f"--format onnx needs {error.name}: pip install '.[onnx]'") from None
    return exported.model_proto.SerializeToString()


def _load_onnx(content: bytes) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def _check_output(program: Callable[[Tensor], Tensor], predictor: Predictor, image_shape: list[int]) -> None:
    """Check that the program and the predictor give the same probabilities for several numbers of images."""
    for count in (1, 5):
        images = _random_images(count, image_shape)
        difference = (program(images) - predictor(images)).abs().max().item()
        if not difference < _TOLERANCE:
            raise RuntimeError(f"the exported program differs from the network by {difference} in a probability")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder, or a checkpoint")
    parser.add_argument("--format", choices=_SUFFIXES, default="torch", help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="the file to write (default: network.pt2 or network.onnx in RUN)")
    parser.add_argument("--checkpoint", default="last", help="last or best; default: %(default)s")
    parser.add_argument("--trust", nargs="*", default=[], help="packages of your own that the network may come from")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".*LeafSpec")  # of torch about itself
    try:
        run = load_run(options.run, options.checkpoint, options.trust)
        folder = options.run if options.run.is_dir() else options.run.parent
        file = options.output or folder / f"network{_SUFFIXES[options.format]}"
        with torch.no_grad(), atomic_write(file) as temporary:
            temporary.write_bytes(export(run.predictor, list(run.config.data.image_shape), options.format))
    except UserError as error:
        sys.exit(f"error: {error}")
    print(f"{file}: uint8 images (n, {', '.join(map(str, run.config.data.image_shape))}) to probabilities (n, classes)")


if __name__ == "__main__":
    main()
