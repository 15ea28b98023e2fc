"""Build the training corpus of the demo model from Debian documentation packages.

The text comes from packages of Debian's ``main`` section, fetched by name with ``apt-get
download`` and unpacked with ``dpkg-deb -x``; nothing is installed. Markup, code listings, tables,
licence boilerplate and repeated paragraphs are dropped, so that what is left is English prose in
ASCII. A byte-level BPE tokenizer is trained on it, and the tokens are written as flat little-endian
uint16 files together with a manifest that names every package, its version and its licence.

Needs a Debian system (bookworm was used), ``lxml``, ``numpy`` and ``tokenizers``::

    python models/corpus.py --work /tmp/demo-corpus --out /tmp/demo-data
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import subprocess
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from lxml import etree, html
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOT = "<|endoftext|>"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True)
class Source:
    """One Debian package: the licence of the files taken, which files, and how to read them."""

    package: str
    licence: str
    kind: str
    globs: tuple[str, ...]
    exclude: str = ""


DOC = "usr/share/doc"
CAMPAIGNS = (
    "did", "dm", "dw", "ei", "httt", "l", "low", "nr", "sof", "sota", "sotbe", "thot", "trow",
    "tsg", "ttb", "utbs",
)  # fmt: skip
WESNOTH = "usr/share/games/wesnoth/1.16/data/campaigns"
SOURCES: tuple[Source, ...] = (
    Source(
        "debian-handbook",
        "GPL-2+ or CC-BY-SA-3.0",
        "html",
        (f"{DOC}/debian-handbook/html/en-US/**/*.html",),
    ),
    Source("debian-reference-en", "GPL-2+", "html", ("usr/share/debian-reference/*.html",)),
    Source("debian-faq", "permissive (SPI)", "html", (f"{DOC}/debian/FAQ/*.html",)),
    Source("developers-reference", "GPL-2", "html", ("usr/share/developers-reference/*.html",)),
    Source("debian-policy", "GPL-2+", "html", (f"{DOC}/debian-policy/policy.html/*.html",)),
    Source("debmake-doc", "Expat", "html", (f"{DOC}/debmake-doc/html/*.html",)),
    Source("harden-doc", "GPL-2", "html", (f"{DOC}/harden-doc/html/en-US/**/*.html",)),
    Source(
        "installation-guide-amd64", "GPL-2", "html", (f"{DOC}/installation-guide-amd64/en/*.html",)
    ),
    Source("aptitude-doc-en", "GPL-2+", "html", (f"{DOC}/aptitude/html/en/*.html",)),
    Source(
        "debian-kernel-handbook", "GPL-2+", "html", (f"{DOC}/debian-kernel-handbook/**/*.html",)
    ),
    Source("debian-history", "GPL-2+", "html", (f"{DOC}/debian-history/docs/*.en.html",)),
    Source("live-manual-html", "GPL-3+", "html", (f"{DOC}/live-manual/html/**/*.en.html",)),
    Source("debian-edu-doc-en", "GPL-2+", "html", (f"{DOC}/debian-edu-doc-en/*bookworm*.html",)),
    Source("maint-guide", "GPL-2+", "html", (f"{DOC}/maint-guide/html/*.en.html",)),
    Source("freedombox-doc-en", "CC-BY-SA-4.0", "html", ("usr/share/freedombox/manual/en/*.html",)),
    Source("gnome-user-docs", "CC-BY-SA-3.0", "html", ("usr/share/help/C/**/*.page",)),
    Source(
        "libreoffice-help-en-us", "MPL-2.0", "html", ("usr/share/libreoffice/help/en-US/**/*.html",)
    ),
    Source(
        "gnucash-docs",
        "GFDL-1.1+ without invariant sections",
        "html",
        (
            f"{DOC}/gnucash-docs/gnucash-guide-en/**/*.html",
            f"{DOC}/gnucash-docs/gnucash-help-en/**/*.html",
        ),
    ),
    Source("kicad-doc-en", "GPL-3+", "html", (f"{DOC}/kicad/help/en/**/*.html",)),
    Source("python3.11-doc", "PSF-2", "html", (f"{DOC}/python3.11/html/**/*.html",)),
    Source(
        "python-django-doc",
        "BSD-3-Clause",
        "html",
        (f"{DOC}/python-django-doc/html/**/*.html",),
        r"_modules|_sources",
    ),
    Source(
        "python-sqlalchemy-doc",
        "Expat",
        "html",
        (f"{DOC}/python-sqlalchemy-doc/html/**/*.html",),
        r"_modules|_sources",
    ),
    Source("perl-doc", "GPL-1+ or Artistic", "pod", ("usr/share/perl/*/pod/*.pod",)),
    Source("git-doc", "GPL-2", "html", (f"{DOC}/git-doc/**/*.html",)),
    Source(
        "linux-doc-6.1",
        "GPL-2",
        "html",
        (f"{DOC}/linux-doc-6.1/html/**/*.html", f"{DOC}/linux-doc-6.1/html/**/*.html.gz"),
        r"_sources|translations|devicetree",
    ),
    Source(
        "mercurial-common",
        "GPL-2+",
        "text",
        ("usr/lib/python3/dist-packages/mercurial/helptext/**/*.txt",),
    ),
    Source("brz-doc", "GPL-2+", "html", (f"{DOC}/brz/html/**/*.html",)),
    Source("postgresql-doc-15", "PostgreSQL", "html", (f"{DOC}/postgresql-doc-15/html/*.html",)),
    Source("sqlite3-doc", "public domain", "html", (f"{DOC}/sqlite3/**/*.html",)),
    Source("postfix-doc", "EPL-2.0 or IPL-1.0", "html", (f"{DOC}/postfix/html/*.html",)),
    Source("exim4-doc-html", "GPL-2+", "html", (f"{DOC}/exim4-doc-html/spec_html/*.html",)),
    Source("apache2-doc", "Apache-2.0", "html", (f"{DOC}/apache2-doc/manual/en/**/*.html",)),
    Source(
        "rust-doc",
        "MIT or Apache-2.0",
        "html",
        tuple(
            f"{DOC}/rust-doc/html/{book}/**/*.html"
            for book in (
                "book",
                "reference",
                "nomicon",
                "cargo",
                "rustc",
                "embedded-book",
                "rustdoc",
            )
        ),
        r"/print\.html",
    ),
    Source("ghc-doc", "BSD-3-Clause", "html", (f"{DOC}/ghc-doc/html/users_guide/**/*.html",)),
    Source(
        "racket-doc",
        "LGPL-2.1+",
        "html",
        (f"{DOC}/racket/**/*.html",),
        r"/srfi|/r[56]rs|search/",
    ),
    Source("r-doc-html", "GPL-2", "html", ("usr/share/R/doc/manual/*.html",)),
    Source(
        "icinga2-doc", "GPL-2+ with OpenSSL exception", "text", (f"{DOC}/icinga2/markdown/*.md.gz",)
    ),
    Source("git-annex", "AGPL-3+", "html", (f"{DOC}/git-annex/html/**/*.html",)),
    Source("ikiwiki", "GPL-2+", "html", (f"{DOC}/ikiwiki/html/**/*.html",)),
    Source("dovecot-core", "MIT", "text", (f"{DOC}/dovecot-core/wiki/*",)),
    *(
        Source(f"{name}-doc", "Apache-2.0", "html", (f"{DOC}/{name}-doc/**/*.html",), r"/_|/api/")
        for name in ("cinder", "glance", "heat", "ironic", "keystone", "neutron", "nova", "swift")
    ),
    Source("libvirt-doc", "LGPL-2.1+", "html", (f"{DOC}/libvirt-doc/html/**/*.html",)),
    Source(
        "imagemagick-6-doc",
        "ImageMagick",
        "html",
        (f"{DOC}/imagemagick-6-common/html/www/*.html",),
    ),
    Source(
        "libboost1.74-doc",
        "BSL-1.0",
        "html",
        (f"{DOC}/libboost1.74-doc/**/*.html", f"{DOC}/libboost1.74-doc/**/*.htm"),
    ),
    Source(
        "erlang-doc", "Apache-2.0", "html", (f"{DOC}/erlang-doc/**/*.html",), r"lib/wx|lib/megaco"
    ),
    Source("slurm-wlm-doc", "GPL-2+", "html", (f"{DOC}/slurm-wlm/html/*.html",)),
    Source("mailman3-doc", "GPL-3", "html", (f"{DOC}/mailman3/html/**/*.html",)),
    Source(
        "python-pandas-doc",
        "BSD-3-Clause",
        "html",
        (f"{DOC}/python-pandas-doc/html/**/*.html",),
        r"/generated/|_modules",
    ),
    Source("python-scipy-doc", "BSD-3-Clause", "html", (f"{DOC}/python-scipy-doc/html/**/*.html",)),
    Source("wireshark-doc", "GPL-2+", "html", (f"{DOC}/wireshark/**/*.html",)),
    Source(
        "shorewall-doc",
        "GFDL-1.2+ without invariant sections",
        "html",
        (f"{DOC}/shorewall-doc/html/**/*.html", f"{DOC}/shorewall-doc/manpages/*.html"),
    ),
    Source("grass-doc", "GPL-2+", "html", (f"{DOC}/grass-doc/html/*.html",)),
    Source(
        "ntpsec-doc", "NTP, CC-BY-4.0 and BSD-2-Clause", "html", (f"{DOC}/ntpsec-doc/html/*.html",)
    ),
    Source("privoxy", "GPL-2+", "html", (f"{DOC}/privoxy/**/*.html",)),
    Source(
        "jargon-text",
        "public domain",
        "jargon",
        (f"{DOC}/jargon-text/*.txt.gz", f"{DOC}/jargon-text/*.gz"),
    ),
    Source("miscfiles", "public domain", "text", ("usr/share/state/us-*.gz",)),
    Source("crawl-common", "GPL-2+", "text", ("usr/share/crawl/dat/descript/*.txt",)),
    Source("endless-sky-data", "GPL-3+", "sky", ("usr/share/games/endless-sky/data/*.txt",)),
    Source("naev-data", "GPL-3+", "strings", ("usr/share/naev/dat/**/*.lua",)),
    *(
        Source(f"wesnoth-1.16-{campaign}", "GPL-2+", "strings", (f"{WESNOTH}/**/*.cfg",))
        for campaign in CAMPAIGNS
    ),
    Source(
        "llvm-14-doc",
        "Apache-2.0 with LLVM exceptions",
        "html",
        (f"{DOC}/llvm-14-doc/html/**/*.html",),
        r"AMDGPU/",
    ),
    Source("cmake-doc", "BSD-3-Clause", "html", (f"{DOC}/cmake-data/html/**/*.html",), "_sources"),
    Source("varnish-doc", "BSD-2-Clause", "html", (f"{DOC}/varnish/html/**/*.html",), "_sources"),
    Source("stellarium-data", "GPL-2+", "html", ("usr/share/stellarium/*/*/description.en.utf8",)),
    Source(
        "freeorion-data",
        "GPL-2",
        "text",
        ("usr/share/games/freeorion/default/stringtables/en.txt",),
    ),
    Source(
        "python-sklearn-doc",
        "BSD-3-Clause",
        "html",
        (f"{DOC}/python-sklearn-doc/html/**/*.html",),
        r"_sources|_modules",
    ),
    Source(
        "gnome-devel-docs", "CC-BY-SA-3.0, CC-BY-SA-4.0", "html", ("usr/share/help/C/**/*.page",)
    ),
    Source("twisted-doc", "Expat", "html", (f"{DOC}/twisted-doc/**/*.html",), r"/api/|_sources"),
    Source("sphinx-doc", "BSD-2-Clause", "html", (f"{DOC}/sphinx-doc/html/**/*.html",), "_sources"),
    Source("doxygen-doc", "GPL-2", "html", (f"{DOC}/doxygen/html/**/*.html",)),
    Source("openafs-doc", "IPL-1.0", "html", (f"{DOC}/openafs-doc/**/*.html",)),
)

SKIP_TAGS = {
    "script", "style", "pre", "table", "nav", "header", "footer", "form", "svg", "math", "head",
    "code-block", "synopsis", "screen", "info", "media", "object", "noscript", "button", "select",
}  # fmt: skip
BLOCK_TAGS = {
    "p", "li", "dd", "dt", "div", "section", "article", "body", "blockquote", "ul", "ol", "dl",
    "h1", "h2", "h3", "h4", "h5", "h6", "br", "hr", "page", "title", "item", "steps", "list",
    "terms", "note", "main", "html", "center", "td", "tr",
}  # fmt: skip

CHARACTERS = str.maketrans(
    {
        "\u2018": "'", "\u2019": "'", "\u201b": "'", "\u201c": '"', "\u201d": '"', "\u201e": '"',
        "\u2010": "-", "\u2011": "-", "\u2012": "-", "\u2013": "-", "\u2014": " - ",
        "\u2015": " - ", "\u2026": "...", "\u00a0": " ", "\u00ad": "", "\u200b": "", "\u00b6": "",
        "\u2022": " ", "\u00ab": '"', "\u00bb": '"', "\ufeff": "", "\u2192": "->", "\u00a7": "",
        "\uf0c1": "",
    }
)  # fmt: skip
STOPWORDS = frozenset(
    (
        "a", "an", "and", "are", "as", "at", "be", "been", "but", "by", "can", "could", "do",
        "does", "for", "from", "had", "has", "have", "he", "her", "his", "how", "i", "if",
        "in", "into", "is", "it", "its", "may", "more", "most", "must", "my", "no", "not",
        "of", "on", "one", "only", "or", "other", "our", "out", "she", "should", "so", "some",
        "such", "than", "that", "the", "their", "them", "then", "there", "these", "they",
        "this", "to", "up", "use", "was", "we", "were", "what", "when", "where", "which",
        "who", "will", "with", "would", "you", "your",
    )
)  # fmt: skip
BOILERPLATE = re.compile(
    r"copyright|\bgnu (general|lesser|free)|warrant(y|ies)\b|licen[cs]ed under|redistribut"
    r"|all rights reserved|://|www\.|\bdiv\b.*\bclass\b|lorem ipsum|deprecated since version"
    r"|^(new|changed) in version|@[a-z]+\.",
    re.IGNORECASE,
)
ODD_WORD = re.compile(r"_|[a-z][A-Z]|\w[./:]\w|[(){}<>=|\\$*^~]\w|\w[({\[<>=|\\$*^~]|\(\)|--|::")
SYMBOL = re.compile(r"[^A-Za-z0-9 .,;:'\"!?()-]")
SENTENCE_START = re.compile(r"[A-Z\"'(]")
SENTENCE_END = re.compile(r"[.!?][\"')]?$")


def normalise(text: str) -> str:
    """Return ``text`` with plain punctuation, no accents or reference marks and single spaces."""
    text = unicodedata.normalize("NFKD", text.translate(CHARACTERS))
    text = "".join(c for c in text if not unicodedata.combining(c))
    text = re.sub(r"\[(\d+|citation needed|edit)\]", "", text)
    text = re.sub(r"``|''", '"', text).replace("`", "'")
    text = re.sub(r"\s+([,;:!?)]|\.(?!\w))", r"\1", re.sub(r"\s+", " ", text))
    return re.sub(r"\(\s+", "(", text).strip()


def is_prose(text: str) -> bool:
    """Tell whether a normalised paragraph reads as English sentences rather than code or a list."""
    if not 50 <= len(text) <= 4000 or not text.isascii():
        return False
    if not SENTENCE_START.match(text) or not SENTENCE_END.search(text) or BOILERPLATE.search(text):
        return False
    words = text.split()
    plain = [w.strip(".,;:!?()\"'").lower() for w in words]
    if len(words) < 9 or sum(w in STOPWORDS for w in plain) < 0.28 * len(words):
        return False
    if sum(bool(ODD_WORD.search(w)) for w in words) > 0.06 * len(words):
        return False
    digits = sum(c.isdigit() for c in text)
    capitals = sum(w[:1].isupper() for w in words)
    return (
        len(SYMBOL.findall(text)) <= 0.012 * len(text)
        and digits <= 0.03 * len(text)
        and capitals <= 0.4 * len(words)
    )


def read_text(path: Path) -> str:
    """Read a text file, gzip-compressed or not, whatever its 8-bit encoding."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def html_blocks(source: str) -> Iterator[str]:
    """Yield the text of each block element of an HTML or Mallard page, less code and tables."""
    try:
        root = html.document_fromstring(source.encode("utf-8"), html.HTMLParser(encoding="utf-8"))
    except (etree.ParserError, etree.XMLSyntaxError):
        return
    buffer: list[str] = []
    blocks: list[str] = []

    def flush() -> None:
        if buffer:
            blocks.append("".join(buffer))
            buffer.clear()

    def walk(node: html.HtmlElement) -> None:
        tag = node.tag if isinstance(node.tag, str) else ""
        if tag in SKIP_TAGS or not tag:
            if tag in {"pre", "table", "screen"}:
                flush()
        elif "headerlink" not in (node.get("class") or ""):
            if tag in BLOCK_TAGS:
                flush()
            buffer.append(node.text or "")
            for child in node:
                walk(child)
            if tag in BLOCK_TAGS:
                flush()
        buffer.append(node.tail or "")

    walk(root)
    flush()
    yield from blocks


def text_blocks(source: str) -> Iterator[str]:
    """Yield the unindented paragraphs of a plain text, reStructuredText or Markdown file."""
    source = re.sub(r"(?s:```.*?```)|^%%%%$|^ *\d+\. ", "\n\n", source, flags=re.MULTILINE)
    source = re.sub(r"\s*\[[\w.-]+\.txt\]|!?\[([^\]]*)\]\([^)]*\)(\{[^}]*\})?", r" \1", source)
    for block in re.split(r"\n\s*\n", source):
        if not block.startswith((" ", "\t", "|", "#", "..")):
            yield re.sub(r"\*+|`+|<(?=[A-Za-z][^<>]*>)|(?<=\w)>", "", block)


def pod_blocks(source: str) -> Iterator[str]:
    """Yield the paragraphs of a Perl POD file with the inline formatting codes taken off."""
    for block in re.split(r"\n\s*\n", source):
        if block.startswith(("=", " ", "\t")):
            continue
        previous = ""
        while previous != block:
            previous = block
            block = re.sub(r"[XZ]<[^<>]*>", "", block)
            block = re.sub(r"L<([^<>|]*)\|[^<>]*>", r"\1", block)
            block = re.sub(r"[A-Z]<<+ (.*?) >+>|[A-Z]<([^<>]*)>", r"\1\2", block)
        yield block


def jargon_blocks(source: str) -> Iterator[str]:
    """Yield the indented paragraphs of the Jargon File, without the heads of its entries."""
    for block in re.split(r"\n\s*\n", source):
        yield re.sub(r"^\s*[^:\n]{1,40}: +/[^/]*/,? *([a-z]{1,4}\. *)*", "", block).replace("_", "")


def sky_blocks(source: str) -> Iterator[str]:
    """Yield the story texts of an Endless Sky data file: its backquoted lines."""
    for text in re.findall(r"`([^`]*)`", source):
        yield re.sub(r"<[^>]*>", "the ship", text) if text.count("<") == 1 else text


def string_blocks(source: str) -> Iterator[str]:
    """Yield the paragraphs of the translatable strings of WML or Lua: dialogue and stories."""
    pattern = r'\b_ ?\(?(?:"((?:[^"\\]|""|\\.)*)"|\[\[(.*?)\]\])'
    for quoted, bracketed in re.findall(pattern, source, flags=re.DOTALL):
        text = (quoted or bracketed).replace('""', '"').replace('\\"', '"').replace("\\n", "\n")
        text = re.sub(r"<[^>]*>|^[^^\n]{1,40}\^", "", text)
        yield from re.split(r"\n\s*\n", text)


READERS: dict[str, Callable[[str], Iterator[str]]] = {
    "html": html_blocks,
    "text": text_blocks,
    "pod": pod_blocks,
    "jargon": jargon_blocks,
    "sky": sky_blocks,
    "strings": string_blocks,
}


def fetch(source: Source, work: Path) -> tuple[Path, str]:
    """Download and unpack one package unless that was done; return its folder and version."""
    debs = work / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    if not list(debs.glob(f"{source.package}_*.deb")):
        subprocess.run(["apt-get", "download", "-q", source.package], cwd=debs, check=True)
    deb = sorted(debs.glob(f"{source.package}_*.deb"))[-1]
    folder = work / "x" / source.package
    if not folder.exists():
        folder.mkdir(parents=True)
        subprocess.run(["dpkg-deb", "-x", str(deb), str(folder)], check=True)
    version = subprocess.run(
        ["dpkg-deb", "-f", str(deb), "Version"], check=True, capture_output=True, text=True
    )
    return folder, version.stdout.strip()


def extract(source: Source, folder: Path) -> list[tuple[str, list[str]]]:
    """Return the documents of one unpacked package as (file name, prose paragraphs)."""
    paths = sorted({p for glob in source.globs for p in folder.glob(glob) if p.is_file()})
    documents = []
    for path in paths:
        name = str(path.relative_to(folder))
        if path.is_symlink() or (source.exclude and re.search(source.exclude, name)):
            continue
        blocks = map(normalise, READERS[source.kind](read_text(path)))
        documents.append((name, [block for block in blocks if is_prose(block)]))
    return documents


class Deduplicator:
    """Drops paragraphs seen before and thins out those that begin with the same few words."""

    def __init__(self, opener_words: int = 4, opener_limit: int = 150) -> None:
        self.seen: set[bytes] = set()
        self.openers: Counter[str] = Counter()
        self.opener_words = opener_words
        self.opener_limit = opener_limit

    def keep(self, paragraph: str) -> bool:
        """Tell whether to keep ``paragraph``, and remember it."""
        key = re.sub(r"[^a-z]+", " ", paragraph.lower()).strip()
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        opener = " ".join(key.split()[: self.opener_words])
        if digest in self.seen or self.openers[opener] >= self.opener_limit:
            return False
        self.seen.add(digest)
        self.openers[opener] += 1
        return True


def build_documents(
    work: Path, min_chars: int
) -> tuple[dict[str, list[str]], list[dict[str, object]]]:
    """Fetch, clean and deduplicate all sources; return the two splits and a list of packages."""
    fetched = [fetch(source, work) for source in SOURCES]
    splits: dict[str, list[str]] = {"train": [], "heldout": []}
    packages: list[dict[str, object]] = []
    dedup = Deduplicator()
    with ProcessPoolExecutor() as pool:
        extracted = pool.map(extract, SOURCES, [folder for folder, _ in fetched])
        for source, (_, version), documents in zip(SOURCES, fetched, extracted, strict=True):
            size = 0
            for name, paragraphs in documents:
                text = "\n\n".join(p for p in paragraphs if dedup.keep(p))
                if len(text) < min_chars:
                    continue
                bucket = hashlib.sha256(f"{source.package}/{name}".encode()).digest()[0]
                splits["heldout" if bucket < 4 else "train"].append(text)
                size += len(text)
            packages.append(
                {
                    "package": source.package,
                    "version": version,
                    "licence": source.licence,
                    "bytes": size,
                }
            )
            print(f"{source.package:28s} {size / 1e6:7.2f} MB", flush=True)
    return splits, packages


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer whose token 0 separates documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write the tokenizer files that transformers and vLLM read."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": EOT,
        "eos_token": EOT,
        "pad_token": EOT,
        "unk_token": None,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def pack(texts: list[str], tokenizer: Tokenizer) -> np.ndarray:
    """Tokenize documents into one uint16 array with token 0 before each document."""
    chunks = []
    for start in range(0, len(texts), 512):
        for encoding in tokenizer.encode_batch(texts[start : start + 512]):
            chunks.append(np.array([0, *encoding.ids], dtype="<u2"))
    return np.concatenate(chunks)


def main() -> None:
    """Build the corpus from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for the packages")
    parser.add_argument("--out", type=Path, required=True, help="folder for the token files")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--tokenizer", type=Path, help="use this tokenizer.json, train none")
    parser.add_argument("--min-chars", type=int, default=200, help="shorter documents are dropped")
    parser.add_argument("--max-length", type=int, default=1024, help="the model's context")
    args = parser.parse_args()

    splits, packages = build_documents(args.work, args.min_chars)
    rng = np.random.default_rng(0)
    for texts in splits.values():
        rng.shuffle(texts)
    if args.tokenizer:
        tokenizer = Tokenizer.from_file(str(args.tokenizer))
    else:
        tokenizer = train_tokenizer(splits["train"], args.vocab_size)
    write_tokenizer(tokenizer, args.out / "tokenizer", args.max_length)
    manifest: dict[str, object] = {"vocab_size": tokenizer.get_vocab_size(), "packages": packages}
    for split, texts in splits.items():
        tokens = pack(texts, tokenizer)
        tokens.tofile(args.out / f"{split}.bin")
        manifest[split] = {
            "documents": len(texts),
            "bytes": sum(map(len, texts)),
            "tokens": len(tokens),
        }
        print(split, manifest[split], flush=True)
    (args.out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    (args.out / "sample.txt").write_text(f"\n{EOT}\n".join(splits["heldout"][:50]))


if __name__ == "__main__":
    main()
