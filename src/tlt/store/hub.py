"""Models and data sets on the Hugging Face hub, such as `Qwen/Qwen3-0.6B` and `openai/gsm8k:main/train`.

At the start of a command, the files are downloaded, and the name in the configuration is replaced by their local
folder. All other code sees only the folder. The field `hub` in the same section of the configuration records the name
and the commit, so that a resumed run loads the same commit.

A name has the form NAME[:SUBSET/SPLIT][@REVISION]. If a local path of this name exists, it is used instead.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from tlt.config import Config
from tlt.data.tables import KINDS
from tlt.files import first_line
from tlt.models.model_folder import FILES
from tlt.progress import working
from tlt_rl import install_hint

_REPOSITORY = r"\w[\w.-]{0,95}/\w[\w.-]{0,95}"
_NAME = re.compile(rf"({_REPOSITORY})(?::(\w[\w.+-]*(?:/\w[\w.+-]*)?))?(?:@(\w[\w./-]*))?")
_MODEL_FILES = ("config.json", "model*.safetensors", "model.safetensors.index.json", *FILES)
_CARDS = ("README.md", ".huggingface.yaml", "dataset_infos.json")  # files that describe subsets and splits


class HubError(ValueError):
    """Error for a name on the Hugging Face hub that cannot be downloaded or used. The message gives the remedy."""


class _Name(NamedTuple):
    repository: str
    choice: str
    """subset and split of a data set, such as `main/train`, as the user typed them"""
    revision: str | None
    kind: str
    """`model` or `dataset`"""


def from_hub(config: Config, state: Mapping[str, Any] | None = None) -> Config:
    """Download the models and data sets that a recipe names on the hub. Return the configuration with their local
    folders as `path`, and with the commits in the fields `hub`. A run resumed from the checkpoint `state` gets the
    commits recorded there. Raises HubError."""
    found = {}
    for section, find in (("model", local_model), ("data", local_data), ("eval", local_data)):
        values = getattr(config, section)
        recorded = state["config"].get(section, {}).get("hub") if state else None
        path, hub = find(values.path, recorded) if values.path else (None, None)
        if hub:
            found[section] = values.model_copy(update={"path": path, "hub": hub})
    return config.model_copy(update=found)


def is_on_hub(path: str) -> bool:
    """Return whether a path in a recipe is a name on the hub."""
    return not path.endswith(KINDS) and _name_of(path, "") is not None


def local_model(path: str, recorded: str | None = None) -> tuple[str, str | None]:
    """Return the local folder of a model, and its name with the commit if `path` is a name on the hub (else None).
    `recorded` is the name with the commit that an earlier run used. If the name is the same, this commit is loaded.
    Raises HubError."""
    name = _name_of(path, "model")
    if not name or name.choice:
        return path, None
    folder = _download(name, _MODEL_FILES, _commit_of(path, recorded))
    if not any(folder.glob("*.safetensors")):
        raise HubError(
            f"{name.repository} on the Hugging Face hub has no *.safetensors file, and tlt reads no other weights: "
            "give another model, or convert this one with transformers' save_pretrained"
        )
    return str(folder), _with_commit(path, folder.name)


def local_data(path: str, recorded: str | None = None) -> tuple[str, str | None]:
    """Return a pattern that matches the local files of a data set, with the same arguments and second result as
    `local_model`. They are links to the files of the chosen subset and split. Raises HubError."""
    name = _name_of(path, "dataset")
    if not name or path.endswith(KINDS):
        return path, None
    from huggingface_hub import cached_assets_path

    folder = _download(name, [*_CARDS, ".gitattributes"], _commit_of(path, recorded))
    files = _chosen(name, folder)
    _download(name, [glob.escape(file) for file in files], folder.name)
    digest = hashlib.sha256("\n".join(files).encode()).hexdigest()[:16]
    place = cached_assets_path("tlt", name.repository.replace("/", "--"), f"{folder.name}-{digest}")
    for number, file in enumerate(files):
        link = place / f"{number:05}{next(kind for kind in KINDS if file.endswith(kind))}"  # keeps the order of files
        if not link.exists():
            link.unlink(missing_ok=True)
            with suppress(FileExistsError):  # another run makes the same link
                link.symlink_to(folder / file)
    return f"{glob.escape(str(place))}/*", _with_commit(path, folder.name)


# -- names -------------------------------------------------------------------------------------------------------------


def _name_of(path: str, kind: str) -> _Name | None:
    found = _NAME.fullmatch(path)
    return None if not found or os.path.exists(path) else _Name(found[1], found[2] or "", found[3], kind)


def _commit_of(path: str, recorded: str | None) -> str | None:
    """Return the commit in `recorded` (NAME@COMMIT) if its name is `path`, else None."""
    name, _, commit = (recorded or "").rpartition("@")
    return commit if name == path else None


def _with_commit(path: str, commit: str) -> str:
    return path if path.endswith(f"@{commit}") else f"{path}@{commit}"


# -- the files of a data set -------------------------------------------------------------------------------------------


def _chosen(name: _Name, folder: Path) -> list[str]:
    """Return the files of the subset and split that a name on the hub selects, by the rules of `datasets`. `folder` is
    the snapshot. Raises HubError."""
    what = f"{name.repository} on the Hugging Face hub"
    with tempfile.TemporaryDirectory() as place:
        outline = Path(place, name.repository.rpartition("/")[2])
        try:
            _write_outline(name, folder, outline)
            files = [os.path.relpath(file, outline) for file in _files_of_split(name, outline)]
        except HubError:
            raise
        except Exception as error:
            why = first_line(error).replace(str(outline), "the data set")
            raise HubError(f"{what} cannot be read by datasets: {why}") from error
    if odd := [file for file in files if file.startswith("..") or not file.endswith(KINDS)]:
        raise HubError(
            f"{what} has {odd[0]} in this split, but tlt reads only {', '.join(KINDS)} files of the data set itself: "
            "convert it, or give another split"
        )
    return files


def _write_outline(name: _Name, folder: Path, outline: Path) -> None:
    """Make a folder with the names of all files of a data set. Only those that describe subsets have their content."""
    from huggingface_hub import get_cached_repo_tree

    outline.mkdir()
    for file in get_cached_repo_tree(name.repository, repo_type=name.kind, revision=folder.name):
        path = outline / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((folder / file.path).read_bytes() if file.path in _CARDS else b"")


def _files_of_split(name: _Name, folder: Path) -> Sequence[str]:
    """Return the paths of the files of the chosen subset and split of the data set in a local folder. By default, they
    are the default subset, and the split `train` or the only one. Raises HubError."""
    try:
        import datasets
    except ImportError:
        raise HubError(f"{name.repository} on the Hugging Face hub needs datasets: {install_hint('data')}") from None
    datasets.disable_progress_bars()
    subsets = datasets.get_dataset_config_names(str(folder))
    subset, _, split = name.choice.partition("/")
    if not split and subset not in subsets:
        subset, split = datasets.get_dataset_default_config_name(str(folder)), subset
    if subset not in subsets:
        raise _unknown(name, "subsets", subsets)
    builder: Any = datasets.load_dataset_builder(str(folder), subset, cache_dir=f"{folder}.cache")
    _refuse_reader_options(name, builder.config)
    splits = {str(split): files for split, files in builder.config.data_files.items()}
    split = split or ("train" if len(splits) > 1 else next(iter(splits)))
    if split not in splits:
        raise _unknown(name, "splits", [f"{subset}/{known}" for known in splits])
    return splits[split]


def _refuse_reader_options(name: _Name, config: Any) -> None:
    """Raise HubError if the card of a data set asks its reader for a choice of rows or columns, such as `filters`."""
    import datasets

    general = {field.name for field in fields(datasets.BuilderConfig)} | {"features"}
    for field in fields(config):
        if field.name not in general and (value := getattr(config, field.name)) not in (field.default, None):
            raise HubError(
                f"{name.repository} on the Hugging Face hub has {field.name} = {value!r:.100} on its card, which tlt "
                "does not apply: load it with datasets, save the rows with to_json, and give that file"
            )


def _unknown(name: _Name, what: str, known: Sequence[str]) -> HubError:
    return HubError(
        f"{name.repository} on the Hugging Face hub has the {what} {', '.join(known)}: give one of these, such as "
        f"{name.repository}:{known[0]}"
    )


# -- the download ------------------------------------------------------------------------------------------------------


def _download(name: _Name, files: Sequence[str], commit: str | None) -> Path:
    """Download these files of a repository at `commit`, or if that is None, at the revision in `name`. Return the
    snapshot folder in the cache of huggingface_hub."""
    from huggingface_hub import snapshot_download

    revision = commit or name.revision
    with _explained(name, revision), _progress(f"download {name.repository}"):
        folder = snapshot_download(
            name.repository, repo_type=name.kind, revision=revision, allow_patterns=list(files), ignore_patterns="*.py"
        )
    return Path(folder)


@contextmanager
def _progress(what: str) -> Iterator[None]:
    """Show the progress of a download: the bars of huggingface_hub on a terminal, else log lines."""
    from huggingface_hub.utils import disable_progress_bars

    if sys.stderr.isatty():
        yield
        return
    with disable_progress_bars(), working(what):
        yield


@contextmanager
def _explained(name: _Name, revision: str | None) -> Iterator[None]:
    """Convert each error of a download into a HubError of one sentence with the remedy."""
    from huggingface_hub import errors, is_offline_mode

    repository, kind = name.repository, "data set" if name.kind == "dataset" else "model"
    options = " --repo-type dataset" if name.kind == "dataset" else ""
    options += f" --revision {revision}" if revision else ""
    what = f"the {kind} {repository} of the Hugging Face hub"
    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(
            f"{what} is gated: accept its licence on its page, and set HF_TOKEN to a token of the account that did so"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"there is no {repository} on this machine, and no {kind} of this name on the Hugging Face hub: correct "
            "the name, or set HF_TOKEN if it is private"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{what} has no revision {revision}: give a branch, a tag or a commit that it has") from error
    except errors.LocalEntryNotFoundError as error:
        missing = f"there is no folder {repository}, and {what} is not complete in the hub's cache"
        if is_offline_mode():
            raise HubError(
                f"{missing}, and HF_HUB_OFFLINE is set: unset it, or run hf download {repository}{options} on a "
                "machine with a network"
            ) from error
        raise HubError(
            f"{missing}, and the hub cannot be reached ({first_line(error.__cause__ or error)}): check the name, "
            "the network, the proxy and HF_ENDPOINT"
        ) from error
    except Exception as error:
        if isinstance(error, OSError) and not isinstance(error, errors.HfHubHTTPError):  # such as a full disk
            raise
        raise HubError(
            f"the download of {what} failed ({first_line(error)}): start again; the files that are complete are kept"
        ) from error
