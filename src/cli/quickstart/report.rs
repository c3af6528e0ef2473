//! What a run of the quickstart found: a table and sentences for people, an object for programs, and what to try next.
#![forbid(unsafe_code)]

use super::made::snapshot_name;
use crate::units::format_size;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Bytes and the time they took.
#[derive(Clone, Copy)]
pub struct Moved {
    /// How many.
    pub bytes: u64,
    /// How long.
    pub time: Duration,
}

/// One line of the table.
pub struct Line {
    /// Which checkpoint, and where it was looked at.
    pub what: String,
    /// What was written.
    pub written: Option<Moved>,
    /// How long its snapshot took.
    pub snapshot: Option<Duration>,
    /// What was compared.
    pub verified: Moved,
}

/// A whole run.
pub struct Report {
    /// What happened, in order.
    pub lines: Vec<Line>,
    /// How long the rollback took.
    pub rollback: Duration,
    /// The snapshot that keeps what it replaced.
    pub kept: String,
    /// How long the clone took.
    pub cloning: Duration,
    /// The clone.
    pub clone: String,
    /// Bytes of one checkpoint.
    pub file_bytes: u64,
    /// Checkpoints that the pool holds.
    pub versions: u64,
    /// What the pool uses for everything in it.
    pub used_bytes: u64,
    /// The volume's subsystem.
    pub nqn: String,
    /// The last good checkpoint's subsystem.
    pub read_only: String,
    /// Where both are.
    pub listen: SocketAddr,
    /// How long it all took.
    pub time: Duration,
}

impl Report {
    /// The checkpoints in a table.
    pub fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        table.set_header(["checkpoint", "written", "seconds", "MiB/s", "snapshot", "compared", "MiB/s"]);
        let rate = |moved: Moved| {
            format!("{:.0}", moved.bytes as f64 / f64::from(1 << 20) / moved.time.as_secs_f64().max(1e-9))
        };
        for line in &self.lines {
            let dash = || "-".to_owned();
            table.add_row([
                line.what.clone(),
                line.written.map_or_else(dash, |moved| format_size(moved.bytes)),
                line.written.map_or_else(dash, |moved| format!("{:.2}", moved.time.as_secs_f64())),
                line.written.map_or_else(dash, rate),
                line.snapshot.map_or_else(dash, milliseconds),
                format_size(line.verified.bytes),
                rate(line.verified),
            ]);
        }
        for at in 1..=6 {
            if let Some(column) = table.column_mut(at) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table
    }

    /// What the table does not hold.
    pub fn sentences(&self) -> String {
        let sum = self.versions * self.file_bytes;
        format!(
            "Snapshot {} at most, rollback {} (what it replaced is kept as {}), clone {}.\n\
             {} checkpoints of {} each are {}; the pool uses {} for all it holds, {:.0} %.\n\
             Every byte was compared. {:.1} s in all.\n",
            milliseconds(self.slowest_snapshot()),
            milliseconds(self.rollback),
            self.kept,
            milliseconds(self.cloning),
            self.versions,
            format_size(self.file_bytes),
            format_size(sum),
            bytes(self.used_bytes),
            self.used_bytes as f64 * 100.0 / sum.max(1) as f64,
            self.time.as_secs_f64(),
        )
    }

    /// The same for programs.
    pub fn to_json(&self) -> Value {
        let seconds = |time: Duration| json!(time.as_secs_f64());
        let moved = |moved: Moved| json!({ "bytes": moved.bytes, "seconds": moved.time.as_secs_f64() });
        let lines = self.lines.iter().map(|line| {
            json!({
                "checkpoint": line.what,
                "written": line.written.map(moved),
                "snapshot_seconds": line.snapshot.map(seconds),
                "compared": moved(line.verified),
            })
        });
        json!({
            "checkpoints": lines.collect::<Vec<_>>(),
            "snapshot_seconds_max": seconds(self.slowest_snapshot()),
            "rollback_seconds": seconds(self.rollback),
            "rollback_kept": self.kept,
            "clone_seconds": seconds(self.cloning),
            "clone": self.clone,
            "checkpoint_bytes": self.file_bytes,
            "versions": self.versions,
            "used_bytes": self.used_bytes,
            "nqn": self.nqn,
            "read_only_nqn": self.read_only,
            "listen": self.listen.to_string(),
            "seconds": seconds(self.time),
        })
    }

    /// How to go on while the daemon serves; `good` is the last good checkpoint.
    pub fn whats_next(&self, socket: &Path, good: u64) -> String {
        let (address, port) = (self.listen.ip(), self.listen.port());
        let rimrock = format!("{} --socket {}", program(), quoted(&socket.display().to_string()));
        format!(
            "
Serving until Ctrl-C. Connect a Linux host (nvme-cli, as root):
  nvme connect -t tcp -a {address} -s {port} -n {}
  nvme connect -t tcp -a {address} -s {port} -n {}     (read-only)
Try next, in another terminal:
  {rimrock} snapshot list
  {rimrock} snapshot diff {} {}
  {rimrock} volume export {}
  {rimrock} volume create data 10GiB
  {rimrock} --help
",
            self.nqn,
            self.read_only,
            snapshot_name(good.saturating_sub(1).max(1)),
            snapshot_name(good),
            self.clone,
        )
    }

    fn slowest_snapshot(&self) -> Duration {
        self.lines.iter().filter_map(|line| line.snapshot).max().unwrap_or_default()
    }
}

/// Bytes in a sentence.
pub fn bytes(count: u64) -> String {
    if count == 0 { "nothing".to_owned() } else { format_size(count) }
}

/// How this program is called from here: by its name where `PATH` leads to it, else by the shortest path.
fn program() -> String {
    let Ok(path) = std::env::current_exe() else { return "rimrock".to_owned() };
    let directories = std::env::var_os("PATH").unwrap_or_default();
    let is_this = |found: PathBuf| found.canonicalize().is_ok_and(|found| found == path);
    if std::env::split_paths(&directories).any(|directory| is_this(directory.join("rimrock"))) {
        return "rimrock".to_owned();
    }
    let here = std::env::current_dir().ok();
    let below = here.and_then(|here| path.strip_prefix(here).ok().map(Path::to_owned));
    match below.map(|below| below.display().to_string()) {
        // A name without a slash would be looked for on `PATH`.
        Some(below) if below.contains('/') => quoted(&below),
        Some(below) => quoted(&format!("./{below}")),
        None => quoted(&path.display().to_string()),
    }
}

/// A word as shells read it.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:@%".contains(c);
    if word.chars().all(is_plain) { word.to_owned() } else { format!("'{}'", word.replace('\'', "'\\''")) }
}

fn milliseconds(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_shells() {
        assert_eq!(quoted("./rimrock-data/rimrock.sock"), "./rimrock-data/rimrock.sock");
        assert_eq!(quoted("/a b/it's"), "'/a b/it'\\''s'");
    }
}
