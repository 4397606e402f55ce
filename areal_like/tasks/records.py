"""The records of a file (JSON lines, CSV, parquet) or of a folder that the package `datasets` reads."""

import codecs
import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import RLock
from typing import Any

from areal_like.hub import need_datasets, shown

Record = tuple[str, Mapping[str, object]]
"""A place for people, such as "path:line", and the columns there."""


def records(key: str, path: str, subset: str | None = None, split: str | None = None) -> Iterator[Record]:
    """The records of the file or folder that `key` of the config names. Of a folder `split` (else "train") of the
    configuration `subset` is read. Raises FileNotFoundError, ValueError."""
    is_folder = Path(path).is_dir()
    if not is_folder and not Path(path).is_file():
        raise FileNotFoundError(f"{key}: no file or folder {path!r}")
    if not is_folder and (subset or split):
        raise ValueError(f"{key}: {path!r} is one file: leave out the split ({split}) and the subset ({subset})")
    if is_folder or path.endswith(".parquet"):
        place = f"{shown(path)} {split or 'train'}" if is_folder else path
        return ((f"{place}:{number}", row) for number, row in enumerate(_table(key, path, subset, split), 1))
    return _csv(path) if Path(path).suffix == ".csv" else _json_lines(path)


def _json_lines(path: str) -> Iterator[Record]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.removeprefix(codecs.BOM_UTF8).strip():
                yield f"{path}:{number}", _fields(f"{path}:{number}", line.removeprefix(codecs.BOM_UTF8))


def _fields(place: str, line: bytes) -> dict[str, object]:
    try:
        fields = json.loads(line.decode().rstrip("\r\n"))
    except json.JSONDecodeError as error:  # which counts lines from this one
        raise ValueError(f"{place}: not JSON: {error.msg}, at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{place}: want a JSON object, got {type(fields).__name__}")
    return fields


def _csv(path: str) -> Iterator[Record]:
    """Each value is a text. The first line names the columns."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                place = f"{path}:{reader.line_num}"
                if None in row or None in row.values():
                    cells = f"expected a cell for each of {', '.join(reader.fieldnames or ())}"
                    raise ValueError(f"{place}: got another number of cells, {cells}: quote texts with commas")
                yield place, row
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}:{reader.line_num}: not CSV in UTF-8: {error}") from None


def _table(key: str, path: str, subset: str | None, split: str | None) -> Any:
    """The rows of a data set: of one that `save_to_disk` wrote, of a parquet file, or of data files as repositories of
    data sets have them."""
    need_datasets(key, path)
    import datasets
    from tqdm import tqdm

    datasets.disable_progress_bars()
    tqdm.set_lock(RLock())  # its own is a semaphore, which a role that is ended would leave behind
    try:
        if Path(path).is_file():
            return datasets.Dataset.from_parquet(path)
        if not any((Path(path) / name).is_file() for name in ("dataset_dict.json", "state.json")):
            return datasets.load_dataset(path, subset, split=split or "train")
        saved = datasets.load_from_disk(path)
        splits = dict(saved) if isinstance(saved, datasets.DatasetDict) else {"train": saved}
        if subset or (split or "train") not in splits:
            raise ValueError(f"got split={split} and subset={subset}, expected a split of {', '.join(splits)} alone")
        return splits[split or "train"]
    except Exception as error:  # a reader of any format
        hint = "see task.split, task.heldout_split, task.subset"
        raise ValueError(f"{key}: {shown(path)!r} can't be read: {' '.join(str(error).split())}; {hint}") from None
