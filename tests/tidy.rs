//! Holds the house in shape: what depends on what, where `unsafe` may be, which words are used for what, how large
//! a file may grow, and that what the pages point at is there.
//!
//! Each rule is a function from sources to complaints. It is applied to the project, where it must find nothing, and
//! to a bad sample, where it must find something: a rule that cannot fail is none.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Component, Path, PathBuf};

#[path = "tidy/text.rs"]
mod text;

use text::{Class, anchors, code_spans, find_word, identifier, line_of, links, only};

/// Every room and the rooms it may name. A room stands below all rooms that name it.
const ROOMS: &[(&str, &[&str])] = &[
    ("units", &[]),
    ("crc32c", &[]),
    ("nearest", &[]),
    ("nvme", &[]),
    ("stream", &["crc32c"]),
    ("memory", &[]),
    ("config", &["nearest", "units"]),
    ("reactor", &["memory"]),
    ("device", &["crc32c", "memory", "reactor", "units"]),
    ("pool", &["crc32c", "device", "memory", "reactor"]),
    ("host", &["crc32c", "memory", "nvme", "reactor"]),
    ("target", &["crc32c", "device", "memory", "nvme", "pool", "reactor"]),
    ("control", &["config", "device", "memory", "nearest", "nvme", "pool", "reactor", "target", "units"]),
    (
        "cli",
        &[
            "config", "control", "device", "host", "memory", "nearest", "nvme", "pool", "reactor", "stream",
            "units",
        ],
    ),
    ("sim", &["device", "memory", "pool", "reactor"]),
    ("bin", &["sim"]),
    ("main", &["cli"]),
    ("lib", &[]),
];

/// The files that may hold `unsafe`, and the modules above them, which cannot forbid it.
const UNSAFE_HOMES: &[&str] = &[
    "src/memory/arena.rs",
    "src/memory/buf.rs",
    "src/memory/mapping.rs",
    "src/memory/shared.rs",
    "src/reactor/ring.rs",
    // Counts allocations, which only a global allocator can.
    "tests/arena.rs",
];
const ABOVE_UNSAFE: &[&str] = &["src/lib.rs", "src/memory/mod.rs", "src/reactor/mod.rs"];

/// Machines: bytes or completions in, bytes or requests out. Files and directories, by the start of their path.
const MACHINES: &[&str] = &[
    "src/nvme/",
    "src/stream/",
    "src/host/connection",
    "src/target/admin.rs",
    "src/target/command_ids.rs",
    "src/target/connection.rs",
    "src/target/features.rs",
    "src/target/identify.rs",
    "src/target/io",
    "src/target/log_page.rs",
    "src/target/queue.rs",
    "src/target/registers.rs",
    "src/target/transfer.rs",
    "src/target/transmit.rs",
    "src/pool/cache.rs",
    "src/pool/journal.rs",
    "src/pool/label.rs",
    "src/pool/node.rs",
    "src/pool/pointer.rs",
    "src/pool/records.rs",
    "src/pool/root.rs",
    "src/pool/space.rs",
    "src/pool/tree.rs",
    "src/control/framing.rs",
    "src/control/jsonrpc.rs",
    "src/control/schema.rs",
];
const OUTSIDE_WORLD: &[&str] = &[
    "Instant::now",
    "SystemTime",
    "TcpStream",
    "TcpListener",
    "UnixStream",
    "std::fs",
    "std::thread",
    "tokio",
    "nix",
];

/// The runtime of the control thread; a channel of it is how other threads wait for a reactor's answer.
const TOKIO_HOMES: &[&str] = &["src/control/", "src/cli/", "src/reactor/sync.rs"];

/// Where an I/O command passes and must find no lock.
const IO_PATH: &[&str] = &[
    "src/device/",
    "src/pool/cache.rs",
    "src/pool/commit.rs",
    "src/pool/io.rs",
    "src/pool/journal.rs",
    "src/pool/local.rs",
    "src/pool/node.rs",
    "src/pool/shard.rs",
    "src/pool/space.rs",
    "src/pool/tree.rs",
    "src/target/connection.rs",
    "src/target/io",
    "src/target/job",
    "src/target/namespace.rs",
    "src/target/queue.rs",
    "src/target/session.rs",
    "src/target/transfer.rs",
    "src/target/transmit.rs",
];

/// A checkpoint is a training checkpoint; rooms that know nothing of training do not say the word. What a pool
/// writes from time to time is a commit.
const NO_CHECKPOINTS: &[&str] = &["memory", "reactor", "device", "pool", "nvme", "target", "host", "control"];

/// Lines a file should not pass, and must not.
const LINES_GOOD: usize = 700;
const LINES_MAX: usize = 900;

struct Source {
    /// Relative to the project, with `/`.
    path: String,
    text: String,
}

impl Source {
    fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    fn is_page(&self) -> bool {
        self.path.ends_with(".md")
    }

    /// The room of a file under `src/`.
    fn room(&self) -> Option<&str> {
        let rest = self.path.strip_prefix("src/")?;
        Some(rest.split(['/', '.']).next().unwrap_or(rest))
    }

    fn is_test(&self) -> bool {
        !self.path.starts_with("src/") || self.path.contains("/tests/") || self.path.ends_with("/tests.rs")
    }

    fn is_in(&self, places: &[&str]) -> bool {
        places.iter().any(|place| self.path.starts_with(place))
    }

    /// The text before the inline test module.
    fn shipped(&self) -> &str {
        let end = self.text.match_indices("#[cfg(test)]\n").map(|(at, _)| at).find(|at| {
            let after = self.text[*at..].lines().nth(1).unwrap_or_default();
            after.trim_start().starts_with("mod ") && after.trim_end().ends_with('{')
        });
        &self.text[..end.unwrap_or(self.text.len())]
    }

    fn at(&self, offset: usize) -> String {
        format!("{}:{}", self.path, line_of(&self.text, offset))
    }
}

/// All text files of the project that people write.
fn project() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut sources, mut directories) = (Vec::new(), vec![root.to_path_buf()]);
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory).expect("a directory of the project is readable") {
            let path = entry.expect("a directory entry is readable").path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let hidden = name.starts_with('.') && name != ".ci" || name == "__pycache__";
            let built =
                directory == root && ["target", "rimrock-data", "Cargo.lock"].contains(&name.as_str());
            if hidden || built {
                continue;
            }
            if path.is_dir() {
                directories.push(path);
            } else if let Ok(text) = String::from_utf8(std::fs::read(&path).unwrap_or_default()) {
                let path = path.strip_prefix(root).expect("it is below the root");
                sources.push(Source { path: path.to_string_lossy().into_owned(), text });
            }
        }
    }
    sources.sort_by(|a, b| a.path.cmp(&b.path));
    sources
}

/// Rooms name only rooms below them.
fn arrows(sources: &[Source]) -> Vec<String> {
    let mut wrong = Vec::new();
    for source in sources.iter().filter(|source| source.is_rust()) {
        let Some(room) = source.room() else { continue };
        let Some((_, may)) = ROOMS.iter().find(|(name, _)| *name == room) else {
            wrong.push(format!("{}: room `{room}` is not in the table of arrows", source.path));
            continue;
        };
        for (at, named) in named_rooms(source) {
            if named == "*" {
                wrong.push(format!("{}: `crate::*` hides what is used", source.at(at)));
            } else if named != room && !may.contains(&named.as_str()) {
                wrong.push(format!("{}: `{room}` may not name `{named}`", source.at(at)));
            }
        }
    }
    wrong
}

/// The rooms that a file's code names, with where.
fn named_rooms(source: &Source) -> Vec<(usize, String)> {
    let code = only(&source.text, Class::Code);
    let mut named = Vec::new();
    for root in ["crate::", "rimrock::"] {
        for at in find_word(&code, root) {
            let rest = &code[at + root.len()..];
            match rest.strip_prefix('{') {
                Some(list) => named.extend(heads_of(list).into_iter().map(|head| (at, head.to_owned()))),
                None if rest.starts_with('*') => named.push((at, "*".to_owned())),
                None => named.push((at, identifier(rest).to_owned())),
            }
        }
    }
    // `super::super::…` that climbs to the top of the crate names rooms as well.
    let depth = source.path.trim_end_matches("/mod.rs").split('/').count() - 1;
    for at in find_word(&code, "super::").filter(|at| !code[..*at].ends_with("super::")) {
        let climbed = code[at..].trim_start_matches("super::");
        let steps = (code[at..].len() - climbed.len()) / "super::".len();
        let head = identifier(climbed);
        if steps >= depth && ROOMS.iter().any(|(room, _)| *room == head) {
            named.push((at, head.to_owned()));
        }
    }
    named
}

/// The first identifiers of the paths in `{a::b, c::{d, e}}`, given what follows the brace.
fn heads_of(list: &str) -> Vec<&str> {
    let (mut heads, mut depth, mut fresh) = (Vec::new(), 0, true);
    for (i, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => fresh = true,
            _ if fresh && !c.is_whitespace() => {
                heads.push(identifier(&list[i..]));
                fresh = false;
            }
            _ => {}
        }
    }
    heads
}

/// `unsafe` stays at home, every use is argued, and everybody else forbids it.
fn unsafety(sources: &[Source]) -> Vec<String> {
    let mut wrong = Vec::new();
    for source in sources.iter().filter(|source| source.is_rust()) {
        let code = only(&source.text, Class::Code);
        let lines: Vec<&str> = source.text.lines().collect();
        let home = UNSAFE_HOMES.contains(&source.path.as_str());
        for at in find_word(&code, "unsafe") {
            let line = line_of(&code, at);
            let above = &lines[line.saturating_sub(9)..line - 1];
            let argued = above.iter().any(|line| line.contains("SAFETY:") || line.contains("# Safety"));
            // What a trait declares `unsafe fn` is argued at its `unsafe impl`.
            let declared = code[at..].starts_with("unsafe fn") || code[at..].starts_with("unsafe extern");
            if !home {
                wrong.push(format!("{}: `unsafe` outside of its homes", source.at(at)));
            } else if !argued && !declared {
                wrong.push(format!("{}: `unsafe` without a SAFETY comment above it", source.at(at)));
            }
        }
        let forbids = code.contains("#![forbid(unsafe_code)]");
        let exempt = home || ABOVE_UNSAFE.contains(&source.path.as_str()) || !source.path.starts_with("src/");
        if !exempt && !forbids {
            wrong.push(format!("{}: `#![forbid(unsafe_code)]` is missing at its top", source.path));
        }
    }
    wrong
}

/// Machines see no clock, socket, thread or runtime; the I/O path has no lock; tokio stays with control and cli.
fn isolation(sources: &[Source]) -> Vec<String> {
    let mut wrong = Vec::new();
    for source in sources.iter().filter(|source| source.is_rust() && !source.is_test()) {
        let code = only(source.shipped(), Class::Code);
        let mut refuse = |words: &[&str], why: &str| {
            for word in words {
                for at in find_word(&code, word) {
                    wrong.push(format!("{}: `{word}` {why}", source.at(at)));
                }
            }
        };
        if source.is_in(MACHINES) {
            refuse(OUTSIDE_WORLD, "in a machine, which must not see the outside world");
        }
        if source.is_in(IO_PATH) && !source.is_in(&["src/device/sim"]) {
            refuse(&["Mutex", "RwLock", "Condvar"], "on the I/O path, which has no locks");
        }
        if !source.is_in(TOKIO_HOMES) {
            refuse(&["tokio"], "outside of control and cli");
        }
    }
    wrong
}

/// Reserved words, unfinished work, and what means nothing outside of the place where it was written.
fn words(sources: &[Source]) -> Vec<String> {
    let mut wrong = Vec::new();
    for source in sources {
        let mut refuse = |text: &str, word: &str, why: &str| {
            for at in find_word(text, word) {
                wrong.push(format!("{}: `{word}` {why}", source.at(at)));
            }
        };
        let whole = source.text.to_lowercase();
        if source.is_rust() {
            let (code, comments) = (only(&source.text, Class::Code), only(&source.text, Class::Comment));
            for mark in ["TODO", "FIXME", "XXX", "HACK"] {
                refuse(&comments, mark, "marks unfinished work");
            }
            for call in ["todo!", "unimplemented!", "dbg!"] {
                refuse(&code, call, "is unfinished work");
            }
            for name in ["util", "utils", "helpers", "misc"] {
                refuse(&code, &format!("mod {name}"), "says nothing about what is in it");
            }
            if source.room().is_some_and(|room| NO_CHECKPOINTS.contains(&room)) {
                for word in ["checkpoint", "checkpoints", "checkpointing"] {
                    refuse(&whole, word, "is a training checkpoint; this room's periodic write is a commit");
                }
            }
        } else {
            for mark in ["TODO", "FIXME", "XXX", "HACK"] {
                refuse(&source.text, mark, "marks unfinished work");
            }
        }
        for (start, rest) in [("/wo", "rk/"), ("/ho", "me/"), ("/ro", "ot/"), ("/us", "ers/")] {
            let place = format!("{start}{rest}");
            for (at, _) in whole.match_indices(&place) {
                if !whole[..at].ends_with(|c: char| c.is_alphanumeric() || "._-$})".contains(c)) {
                    wrong.push(format!("{}: `{place}` is a path of one machine", source.at(at)));
                }
            }
        }
        for at in find_word(&whole, "issue") {
            let number = whole[at + "issue".len()..].trim_start_matches([' ', '#']);
            if number.starts_with(|c: char| c.is_ascii_digit()) {
                wrong.push(format!("{}: the number of an issue; say what it is about", source.at(at)));
            }
        }
    }
    wrong
}

/// No file grows beyond what one reads in one go. Tests count apart from what they test.
fn sizes(sources: &[Source]) -> (Vec<String>, Vec<String>) {
    let (mut wrong, mut large) = (Vec::new(), Vec::new());
    for source in sources.iter().filter(|source| source.is_rust() || source.path.ends_with(".py")) {
        let shipped = source.shipped().lines().count();
        let lines = shipped.max(source.text.lines().count() - shipped);
        if lines > LINES_MAX {
            wrong.push(format!("{}: {lines} lines; {LINES_MAX} is the most, split it", source.path));
        } else if lines > LINES_GOOD {
            large.push(format!("{}: {lines} lines; {LINES_GOOD} would be good", source.path));
        }
    }
    (wrong, large)
}

/// Every module begins by saying what it is.
fn headers(sources: &[Source]) -> Vec<String> {
    let modules = sources.iter().filter(|source| source.is_rust() && !source.is_test());
    let silent = modules.filter(|source| !source.text.starts_with("//! "));
    silent.map(|source| format!("{}: does not begin with `//!` and what it is", source.path)).collect()
}

/// `path` as seen from the page `from`, without `.` and `..`; `None` when it leaves the project.
fn resolve(from: &str, path: &str) -> Option<String> {
    let joined = Path::new(from).parent().unwrap_or(Path::new("")).join(path);
    let mut clean = PathBuf::new();
    for part in joined.components() {
        match part {
            Component::Normal(name) => clean.push(name),
            Component::ParentDir if clean.pop() => {}
            Component::CurDir => {}
            _ => return None,
        }
    }
    Some(clean.to_string_lossy().into_owned())
}

/// What pages link to or name is there, and every page of docs/ can be reached from README.md.
fn pages(sources: &[Source], exists: &dyn Fn(&str) -> bool) -> Vec<String> {
    let by_path: BTreeMap<&str, &Source> = sources
        .iter()
        .filter(|source| source.is_page())
        .map(|source| (source.path.as_str(), source))
        .collect();
    let mut wrong = Vec::new();
    for page in by_path.values() {
        for (line, target) in links(&page.text) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (file, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let path = if file.is_empty() { Some(page.path.clone()) } else { resolve(&page.path, file) };
            match path.filter(|path| exists(path)) {
                None => wrong.push(format!("{}:{line}: links to {target}, which is not there", page.path)),
                Some(path) if !anchor.is_empty() => {
                    if by_path
                        .get(path.as_str())
                        .is_some_and(|to| !anchors(&to.text).iter().any(|a| a == anchor))
                    {
                        wrong.push(format!("{}:{line}: {path} has no heading for #{anchor}", page.path));
                    }
                }
                Some(_) => {}
            }
        }
        for (line, span) in code_spans(&page.text) {
            let tree = ["src/", "tests/", "docs/", "vm-tests/", "config/", "scripts/", "benches/"];
            let is_path =
                tree.iter().any(|top| span.starts_with(top)) && !span.contains([' ', '*', '{', '<', '…']);
            if is_path && !exists(span.trim_end_matches('/')) {
                wrong.push(format!("{}:{line}: names `{span}`, which is not there", page.path));
            }
        }
    }
    let (mut reached, mut queue) = (BTreeSet::new(), VecDeque::from(["README.md".to_owned()]));
    while let Some(path) = queue.pop_front() {
        let Some(page) = by_path.get(path.as_str()) else { continue };
        if reached.insert(path.clone()) {
            let targets = links(&page.text).into_iter();
            queue.extend(targets.filter_map(|(_, target)| resolve(&path, target.split('#').next()?)));
        }
    }
    let lost = by_path.keys().filter(|path| path.starts_with("docs/") && !reached.contains(**path));
    wrong.extend(lost.map(|path| format!("{path}: no link from README.md leads here")));
    wrong
}

/// Every crate is used, and docs/libraries.md says why.
fn crates(manifest: &str, reasons: &str, sources: &[Source]) -> Vec<String> {
    let manifest: toml::Table = manifest.parse().expect("Cargo.toml is TOML");
    let code: Vec<String> = sources
        .iter()
        .filter(|source| source.is_rust())
        .map(|source| only(&source.text, Class::Code))
        .collect();
    let mut wrong = Vec::new();
    for section in ["dependencies", "dev-dependencies", "build-dependencies"] {
        for name in
            manifest.get(section).and_then(toml::Value::as_table).into_iter().flat_map(|table| table.keys())
        {
            let word = format!("{}::", name.replace('-', "_"));
            if !code.iter().any(|code| find_word(code, &word).next().is_some()) {
                wrong.push(format!("Cargo.toml: `{name}` is not used"));
            }
            if !reasons.contains(&format!("`{name}`")) {
                wrong.push(format!("docs/libraries.md: does not say why `{name}` is there"));
            }
        }
    }
    wrong
}

fn assert_tidy(wrong: Vec<String>) {
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

fn sample(path: &str, text: &str) -> Vec<Source> {
    vec![Source { path: path.into(), text: text.into() }]
}

/// What a rule says of a sample, for comparing.
fn says(wrong: &[String], part: &str) -> bool {
    wrong.iter().any(|complaint| complaint.contains(part))
}

#[test]
fn the_whole_project_is_looked_at() {
    let sources = project();
    for path in ["src/lib.rs", "src/target/io.rs", "README.md", ".ci/run", "vm-tests/run", "Makefile"] {
        assert!(sources.iter().any(|source| source.path == path), "{path} is not looked at");
    }
    assert!(sources.iter().filter(|source| source.is_rust()).count() > 100);
}

#[test]
fn rooms_name_only_rooms_below_them() {
    assert_tidy(arrows(&project()));
    // The table itself has no circle: whatever a room names stands above it in the table.
    for (i, (room, may)) in ROOMS.iter().enumerate() {
        for named in *may {
            assert!(ROOMS[..i].iter().any(|(below, _)| below == named), "{room} names {named} upwards");
        }
    }
    for bad in [
        "use crate::target::Target;",
        "fn f() { crate::cli::main(); }",
        "use crate::{memory::DmaBuf, control::{a, b}};",
        "use super::super::pool::Volume;",
        "use crate::*;",
    ] {
        assert_eq!(arrows(&sample("src/device/ram.rs", bad)).len(), 1, "{bad}");
    }
    assert_eq!(arrows(&sample("src/units.rs", "use super::pool;")).len(), 1);
    assert_eq!(arrows(&sample("src/cellar/mod.rs", "")).len(), 1);
    for good in [
        "use crate::{memory::DmaBuf, reactor::{self, spin}};",
        "// crate::target is above\nconst A: &str = \"crate::cli\";",
        "use super::super::device::X; use super::error::IoError;",
    ] {
        assert_tidy(arrows(&sample("src/device/ram.rs", good)));
    }
}

#[test]
fn unsafe_stays_at_home_and_is_argued() {
    assert_tidy(unsafety(&project()));
    let forbid = "#![forbid(unsafe_code)]\n";
    assert!(says(&unsafety(&sample("src/pool/io.rs", &format!("{forbid}unsafe {{ f() }}"))), "outside"));
    assert!(says(&unsafety(&sample("src/pool/io.rs", "// #![forbid(unsafe_code)]\n")), "missing"));
    assert!(says(&unsafety(&sample("src/memory/buf.rs", "fn f() {\n    unsafe { g() }\n}")), "SAFETY"));
    assert!(says(&unsafety(&sample("tests/x.rs", "unsafe impl Send for X {}")), "outside"));
    assert_tidy(unsafety(&sample("src/memory/buf.rs", "// SAFETY: the view rule.\nunsafe { g() }")));
    assert_tidy(unsafety(&sample(
        "src/pool/io.rs",
        &format!("{forbid}// unsafe\nconst A: &str = \"unsafe\";"),
    )));
    // A home that has become safe is no home any more.
    for home in UNSAFE_HOMES {
        let source = project().into_iter().find(|source| source.path == *home);
        let code = source.map(|source| only(&source.text, Class::Code)).unwrap_or_default();
        assert!(find_word(&code, "unsafe").next().is_some(), "{home} has no unsafe; take it off the list");
    }
}

#[test]
fn machines_are_isolated_and_the_io_path_has_no_locks() {
    assert_tidy(isolation(&project()));
    assert_eq!(isolation(&sample("src/nvme/tcp.rs", "let now = std::time::Instant::now();")).len(), 1);
    assert_eq!(isolation(&sample("src/pool/tree.rs", "use std::fs::File;")).len(), 1);
    assert_eq!(isolation(&sample("src/pool/shard.rs", "use std::sync::Mutex;")).len(), 1);
    assert_eq!(isolation(&sample("src/reactor/handle.rs", "tokio::spawn(f)")).len(), 1);
    let inline = "fn f() {}\n#[cfg(test)]\nmod tests {\n    fn g() { Instant::now(); }\n}\n";
    assert_tidy(isolation(&sample("src/nvme/tcp.rs", inline)));
    for place in MACHINES.iter().chain(IO_PATH) {
        assert!(project().iter().any(|source| source.is_in(&[place])), "{place} is not there any more");
    }
}

#[test]
fn words_mean_one_thing_and_nothing_is_unfinished() {
    assert_tidy(words(&project()));
    for (path, bad) in [
        ("src/pool/commit.rs", "// Writes a checkpoint of the shard.".to_owned()),
        ("src/cli/mod.rs", "fn f() { todo!() }".to_owned()),
        ("src/cli/mod.rs", format!("// {}: finish", "TO".to_owned() + "DO")),
        ("src/cli/mod.rs", "mod utils;".to_owned()),
        ("docs/x.md", format!("see {}x", ["/ro", "ot/"].concat())),
        ("docs/x.md", format!("as {} 12 asks", "issue")),
        ("scripts/test", format!("# {}", ["FIX", "ME"].concat())),
    ] {
        assert_eq!(words(&sample(path, &bad)).len(), 1, "{path}: {bad}");
    }
    assert_tidy(words(&sample(
        "src/cli/mod.rs",
        "// The checkpoint is written to /var/lib; the issue is how.",
    )));
}

#[test]
fn files_stay_small() {
    let (wrong, large) = sizes(&project());
    large.iter().for_each(|warning| println!("warning: {warning}"));
    assert_tidy(wrong);
    let lines = |n: usize| "x\n".repeat(n);
    assert_eq!(sizes(&sample("src/a.rs", &lines(LINES_MAX + 1))).0.len(), 1);
    assert_eq!(sizes(&sample("src/a.rs", &lines(LINES_GOOD + 1))).1.len(), 1);
    let with_tests = lines(600) + "#[cfg(test)]\nmod tests {\n" + &lines(600);
    assert_eq!(sizes(&sample("src/a.rs", &with_tests)), (vec![], vec![]));
}

#[test]
fn every_module_says_what_it_is() {
    assert_tidy(headers(&project()));
    assert_eq!(headers(&sample("src/pool/x.rs", "use std::rc::Rc;\n//! late\n")).len(), 1);
}

#[test]
fn pages_point_at_what_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    assert_tidy(pages(&project(), &|path| root.join(path).exists()));
    let page = |path: &str, text: &str| Source { path: path.into(), text: text.into() };
    let check = |readme: &str| {
        let all = [page("README.md", readme), page("docs/a.md", "# One two\n[up](../README.md)\n")];
        let there = ["README.md", "docs/a.md", "src/lib.rs"];
        pages(&all, &|path| there.contains(&path))
    };
    assert_tidy(check("[a](docs/a.md#one-two) `src/lib.rs` [w](https://example.org/x)\n"));
    assert!(says(&check("[a](docs/a.md) [b](docs/b.md)\n"), "not there"));
    assert!(says(&check("[a](docs/a.md#three)\n"), "no heading"));
    assert!(says(&check("[a](docs/a.md) `src/gone.rs`\n"), "names `src/gone.rs`"));
    assert!(says(&check("nothing\n"), "no link from README.md"));
    assert!(says(&check("[a](docs/a.md) [o](../../etc)\n"), "not there"));
}

#[test]
fn every_crate_is_used_and_argued() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).expect("it is readable");
    assert_tidy(crates(&read("Cargo.toml"), &read("docs/libraries.md"), &project()));
    let manifest = "[dependencies]\nslab = \"1\"\nio-uring = \"0.7\"\n";
    let code = sample("src/lib.rs", "use slab::Slab; // io_uring::\n");
    assert_eq!(crates(manifest, "`slab` `io-uring`", &code), ["Cargo.toml: `io-uring` is not used"]);
    assert_eq!(crates("[dependencies]\nslab = \"1\"\n", "", &code).len(), 1);
}
