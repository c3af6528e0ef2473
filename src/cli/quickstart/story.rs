//! What the quickstart does, step by step, and what it prints of it.
#![forbid(unsafe_code)]

use super::checkpoint::{Content, Layout};
use super::link::Link;
use crate::cli::client::{Arguments, call};
use crate::cli::output::{Format, print};
use crate::cli::{Common, Failure};
use crate::units::format_size;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const POOL: &str = "main";
const VOLUME: &str = "model";
/// Good checkpoints of one run; one bad one follows.
const CHECKPOINTS: u64 = 5;
/// Training steps between checkpoints.
const STEPS: u64 = 1000;
/// Checkpoints kept from earlier runs.
const KEPT: usize = 5;

/// Everything the story needs to know.
pub struct Story {
    /// The control socket.
    pub socket: PathBuf,
    /// Where the pool's file is.
    pub dir: PathBuf,
    /// Size of the pool's file if it has to be created.
    pub pool_bytes: u64,
    /// Size of all checkpoints together.
    pub all_bytes: u64,
    /// Where to listen.
    pub listen: SocketAddr,
    /// Whether everything ends with the story.
    pub once: bool,
}

/// Bytes and the time they took.
#[derive(Clone, Copy)]
struct Moved {
    bytes: u64,
    time: Duration,
}

/// One line of the table.
struct Line {
    what: String,
    written: Option<Moved>,
    snapshot: Option<Duration>,
    verified: Moved,
}

impl Story {
    /// Does everything and prints it.
    pub fn tell(&self) -> Result<(), Failure> {
        let layout = Layout::new(self.all_bytes / (CHECKPOINTS + 1));
        let started = Instant::now();
        print(&format!(
            "A model of {} in {} tensors, {CHECKPOINTS} checkpoints and a bad one, through NVMe/TCP.\n\n",
            format_size(layout.file_len()),
            layout.tensor_count(),
        ));
        self.bring_up_pool()?;
        self.volume(&layout)?;
        self.prune()?;
        let export = Arguments::new().with("name", VOLUME).with("listen", self.listen.to_string());
        let exported = self.call("volume_export", export).map_err(|failure| {
            failure.hint(
                "something else listens there: --listen chooses another address, such as 127.0.0.1:4421",
            )
        })?;
        let exported = exported.0;
        let nqn = text(&exported, "nqn");
        print(&format!("  volume {VOLUME} is exported as {nqn} at {}\n", self.listen));
        let link = Link::connect(self.listen, &nqn)?;

        let mut lines = Vec::new();
        let last = self.resume(&link, &layout, &mut lines)?;
        let mut good = last;
        for number in last + 1..=last + CHECKPOINTS {
            lines.push(self.checkpoint(&link, &layout, number, number == 1)?);
            good = number;
        }
        let (kept, rollback) = self.go_wrong(&link, &layout, good, &mut lines)?;
        let (clone, cloning) = self.clone(good)?;
        let read_only = self.serve_read_only(&layout, good, &mut lines)?;

        print(&format!("\n{}\n", table(&lines)));
        self.report(&layout, &lines, rollback, cloning, &kept)?;
        print(&format!("Every byte was compared. {:.1} s in all.\n", started.elapsed().as_secs_f64()));
        if !self.once {
            self.whats_next(&nqn, &read_only, good, &clone);
        }
        Ok(())
    }

    /// Imports the pool of an earlier run, or creates one.
    fn bring_up_pool(&self) -> Result<(), Failure> {
        let file = self.dir.join("pool.img");
        if file.exists() {
            let uri = format!("uring:{}", file.display());
            let devices = Arguments::new().with("devices", vec![uri]);
            let info = self.call("pool_import", devices).map_err(|failure| about_file(failure, &file))?.0;
            print(&format!(
                "  pool {POOL} is imported from {} again: {} used\n",
                file.display(),
                bytes(info["allocated"].as_u64().unwrap_or(0))
            ));
            return Ok(());
        }
        let uri = format!("uring:{}?size={}", file.display(), self.pool_bytes);
        let arguments = Arguments::new().with("name", POOL).with("devices", vec![uri]);
        self.call("pool_create", arguments).map_err(|failure| about_file(failure, &file))?;
        print(&format!(
            "  pool {POOL} is created on {} ({}, sparse)\n",
            file.display(),
            format_size(self.pool_bytes)
        ));
        Ok(())
    }

    fn volume(&self, layout: &Layout) -> Result<(), Failure> {
        let known = self.call("volume_get", Arguments::new().with("name", VOLUME));
        let size = match &known {
            Ok((volume, _)) => volume["size"].as_u64().unwrap_or(0),
            Err(_) => {
                let size = layout.blocks_len().next_multiple_of(1 << 30);
                self.call("volume_create", Arguments::new().with("name", VOLUME).with("size", size))?;
                print(&format!("  volume {VOLUME} of {} is created, thin\n", format_size(size)));
                size
            }
        };
        if size < layout.blocks_len() {
            let size = layout.blocks_len().next_multiple_of(1 << 30);
            self.call("volume_resize", Arguments::new().with("name", VOLUME).with("size", size))?;
        }
        Ok(())
    }

    /// Makes room: of what earlier runs left, only the newest few checkpoints stay.
    fn prune(&self) -> Result<(), Failure> {
        for clone in names(&self.call("volume_list", Arguments::new().with("clones", true))?.0) {
            if clone.starts_with("finetune-") {
                self.call("volume_delete", Arguments::new().with("name", clone))?;
            }
        }
        let mut snapshots = names(&self.call("snapshot_list", Arguments::new())?.0);
        snapshots.sort_unstable_by_key(|name| step_of(name));
        let (bad, good): (Vec<String>, Vec<String>) =
            snapshots.into_iter().partition(|name| name.ends_with("-bad"));
        let old = good.len().saturating_sub(KEPT);
        let gone: Vec<&String> = bad.iter().chain(&good[..old]).collect();
        for name in &gone {
            // It may not be exported, which is no error here.
            let _ = self.call("volume_unexport", Arguments::new().with("name", name.as_str()));
            self.call("snapshot_delete", Arguments::new().with("name", name.as_str()))?;
        }
        if !gone.is_empty() {
            print(&format!("  of earlier runs {} snapshot(s) are deleted\n", gone.len()));
        }
        Ok(())
    }

    /// Finds out where an earlier run ended, and compares what it left. Gives the number of its last checkpoint.
    fn resume(&self, link: &Link, layout: &Layout, lines: &mut Vec<Line>) -> Result<u64, Failure> {
        let head = link.read_head(layout.header_len())?;
        if head.iter().all(|byte| *byte == 0) {
            return Ok(0);
        }
        match layout.recognise(&head) {
            Some(content @ Content::Good { step }) => {
                let verified = verify(link, layout, content, "comparing what the last run left")?;
                lines.push(Line {
                    what: format!("step {} as left", step * STEPS),
                    written: None,
                    snapshot: None,
                    verified,
                });
                Ok(step)
            }
            Some(Content::Bad { step }) => {
                // A run that was interrupted between its bad checkpoint and the rollback.
                let name = snapshot_name(step - 1);
                let arguments =
                    Arguments::new().with("name", VOLUME).with("snapshot", name).with("discard", true);
                self.call("volume_rollback", arguments)?;
                Ok(step - 1)
            }
            None => Err(Failure::failed(format!(
                "the volume {VOLUME} holds checkpoints of another size, or none of ours"
            ))
            .hint(format!(
                "give the same --size as before, or another --dir, or remove {}",
                self.dir.display()
            ))),
        }
    }

    /// Writes a checkpoint, takes its snapshot, compares it.
    fn checkpoint(&self, link: &Link, layout: &Layout, number: u64, first: bool) -> Result<Line, Failure> {
        let (content, step) = (Content::Good { step: number }, number * STEPS);
        let written = write(link, layout, content, first, &format!("writing step {step}"))?;
        let arguments = Arguments::new().with("volume", VOLUME).with("name", snapshot_name(number));
        let (_, snapshot) = self.call("snapshot_create", arguments)?;
        let verified = verify(link, layout, content, &format!("comparing step {step}"))?;
        Ok(Line { what: format!("step {step}"), written: Some(written), snapshot: Some(snapshot), verified })
    }

    /// Writes a checkpoint of a run that went wrong and goes back to the last good one.
    fn go_wrong(
        &self,
        link: &Link,
        layout: &Layout,
        good: u64,
        lines: &mut Vec<Line>,
    ) -> Result<(String, Duration), Failure> {
        let (bad, step) = (Content::Bad { step: good + 1 }, (good + 1) * STEPS);
        let written = write(link, layout, bad, false, &format!("writing step {step}, all NaN"))?;
        let verified = verify(link, layout, bad, &format!("comparing step {step}"))?;
        lines.push(Line {
            what: format!("step {step}, bad"),
            written: Some(written),
            snapshot: None,
            verified,
        });
        let keep = format!("{VOLUME}@step-{step}-bad");
        let arguments = Arguments::new()
            .with("name", VOLUME)
            .with("snapshot", snapshot_name(good))
            .with("keep", keep.as_str());
        let (_, rollback) = self.call("volume_rollback", arguments)?;
        let content = Content::Good { step: good };
        let verified = verify(link, layout, content, "comparing after the rollback")?;
        lines.push(Line {
            what: format!("step {} again", good * STEPS),
            written: None,
            snapshot: None,
            verified,
        });
        Ok((keep, rollback))
    }

    fn clone(&self, good: u64) -> Result<(String, Duration), Failure> {
        let name = format!("finetune-{}", good * STEPS);
        let arguments = Arguments::new().with("snapshot", snapshot_name(good)).with("name", name.as_str());
        let (_, time) = self.call("clone_create", arguments)?;
        Ok((name, time))
    }

    /// Exports the last good checkpoint read-only and compares it there.
    fn serve_read_only(&self, layout: &Layout, good: u64, lines: &mut Vec<Line>) -> Result<String, Failure> {
        let exported = self
            .call(
                "volume_export",
                Arguments::new().with("name", snapshot_name(good)).with("listen", self.listen.to_string()),
            )?
            .0;
        let nqn = text(&exported, "nqn");
        let link = Link::connect(self.listen, &nqn)?;
        let content = Content::Good { step: good };
        let verified = verify(&link, layout, content, "comparing the read-only export")?;
        lines.push(Line {
            what: format!("step {} read-only", good * STEPS),
            written: None,
            snapshot: None,
            verified,
        });
        if !link.refuses_writes() {
            return Err(Failure::failed(
                "a write to the read-only export was not refused; this is a fault of Rimrock",
            ));
        }
        Ok(nqn)
    }

    fn report(
        &self,
        layout: &Layout,
        lines: &[Line],
        rollback: Duration,
        cloning: Duration,
        kept: &str,
    ) -> Result<(), Failure> {
        let pool = self.call("pool_get", Arguments::new().with("name", POOL))?.0;
        let snapshots = self.call("snapshot_list", Arguments::new())?.0;
        let count = snapshots.as_array().map_or(0, Vec::len) as u64;
        let sum = count * layout.file_len();
        let used = pool["allocated"].as_u64().unwrap_or(0) + pool["metadata"].as_u64().unwrap_or(0);
        let slowest = lines.iter().filter_map(|line| line.snapshot).max().unwrap_or_default();
        print(&format!(
            "Snapshot {} at most, rollback {} (what it replaced is kept as {kept}), clone {}.\n\
             {count} checkpoints of {} each are {}; the pool uses {} for them, {:.0} %.\n",
            milliseconds(slowest),
            milliseconds(rollback),
            milliseconds(cloning),
            format_size(layout.file_len()),
            format_size(sum),
            bytes(used),
            used as f64 * 100.0 / sum.max(1) as f64,
        ));
        Ok(())
    }

    fn whats_next(&self, nqn: &str, read_only: &str, good: u64, clone: &str) {
        let (address, port) = (self.listen.ip(), self.listen.port());
        let rimrock = format!("rimrock --socket {}", self.socket.display());
        let snapshot = snapshot_name(good);
        print(&format!(
            "
Serving until Ctrl-C. Connect a Linux host (nvme-cli, as root):
  nvme connect -t tcp -a {address} -s {port} -n {nqn}
  nvme connect -t tcp -a {address} -s {port} -n {read_only}     (read-only)
Try next, in another terminal:
  {rimrock} snapshot list
  {rimrock} snapshot diff {} {snapshot}
  {rimrock} volume export {clone}
  {rimrock} volume create data 10GiB
  {rimrock} --help
",
            snapshot_name(good.saturating_sub(1).max(1)),
        ));
    }

    /// A call and how long it took as the client sees it.
    fn call(&self, method: &str, arguments: Arguments) -> Result<(Value, Duration), Failure> {
        let common = Common { socket: Some(self.socket.clone()), output: Format::Json };
        let started = Instant::now();
        let result = call(&common, method, arguments)?;
        Ok((result, started.elapsed()))
    }
}

fn about_file(failure: Failure, file: &Path) -> Failure {
    match &failure.hint {
        Some(_) => failure,
        None => failure.hint(format!("the pool's file is {}; --dir chooses another place", file.display())),
    }
}

fn snapshot_name(number: u64) -> String {
    format!("{VOLUME}@step-{}", number * STEPS)
}

/// The step in a snapshot's name, for sorting.
fn step_of(name: &str) -> u64 {
    let digits = name.rsplit_once("@step-").map_or("", |(_, step)| step.trim_end_matches("-bad"));
    digits.parse().unwrap_or(0)
}

fn names(list: &Value) -> Vec<String> {
    let objects = list.as_array().map_or(&[][..], Vec::as_slice);
    objects.iter().map(|object| text(object, "name")).collect()
}

fn text(object: &Value, member: &str) -> String {
    object[member].as_str().unwrap_or_default().to_owned()
}

fn bytes(count: u64) -> String {
    if count == 0 { "nothing".to_owned() } else { format_size(count) }
}

fn milliseconds(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1e3)
}

fn write(link: &Link, layout: &Layout, content: Content, first: bool, what: &str) -> Result<Moved, Failure> {
    let ranges = layout.changes(content, first);
    let bar = bar(ranges.iter().map(|(_, len)| len).sum(), what);
    let started = Instant::now();
    let bytes = link.write(layout, content, &ranges, &|count| bar.inc(count))?;
    let time = started.elapsed();
    bar.finish_and_clear();
    Ok(Moved { bytes, time })
}

fn verify(link: &Link, layout: &Layout, content: Content, what: &str) -> Result<Moved, Failure> {
    let bar = bar(layout.blocks_len(), what);
    let started = Instant::now();
    let bytes = link.verify(layout, content, &|count| bar.inc(count)).map_err(|failure| {
        bar.abandon();
        failure.hint(format!("while {what}"))
    })?;
    let time = started.elapsed();
    bar.finish_and_clear();
    Ok(Moved { bytes, time })
}

/// A progress bar on standard error; nothing where that is not a terminal.
fn bar(len: u64, what: &str) -> ProgressBar {
    let bar = ProgressBar::new(len).with_message(what.to_owned());
    let form = "  {msg:32} {bar:30} {binary_bytes:>10} {binary_bytes_per_sec:>12}";
    match ProgressStyle::with_template(form) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

fn table(lines: &[Line]) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table.set_header(["checkpoint", "written", "seconds", "MiB/s", "snapshot", "compared", "MiB/s"]);
    let rate = |moved: Moved| {
        format!("{:.0}", moved.bytes as f64 / f64::from(1 << 20) / moved.time.as_secs_f64().max(1e-9))
    };
    for line in lines {
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
