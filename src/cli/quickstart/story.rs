//! What the quickstart does, step by step, and what it says meanwhile.
//!
//! The pool is the user's by now: whatever an earlier run did not make itself is left alone.
#![forbid(unsafe_code)]

use super::checkpoint::{Content, Layout};
use super::link::Link;
use super::made::{self, CHECKPOINTS, POOL, STEPS, VOLUME, snapshot_name};
use super::report::{Line, Moved, Report, bytes};
use crate::cli::client::{Arguments, call};
use crate::cli::output::{Format, print};
use crate::cli::{Common, Failure};
use crate::units::format_size;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

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
    /// Sentences and a table, or one object at the end.
    pub format: Format,
}

impl Story {
    /// Does everything and prints it.
    pub fn tell(&self) -> Result<(), Failure> {
        let layout = Layout::new(self.all_bytes / (CHECKPOINTS + 1));
        let started = Instant::now();
        self.say(&format!(
            "A model of {} in {} tensors, {CHECKPOINTS} checkpoints and a bad one, through NVMe/TCP.\n\n",
            format_size(layout.file_len()),
            layout.tensor_count(),
        ))?;
        self.bring_up_pool()?;
        self.volume(&layout)?;
        let export = Arguments::new().with("name", VOLUME).with("listen", self.listen.to_string());
        let exported = self.call("volume_export", export).map_err(|failure| {
            failure.hint(
                "something else listens there: --listen chooses another address, such as 127.0.0.1:4421",
            )
        })?;
        let nqn = text(&exported.0, "nqn");
        self.say(&format!("  volume {VOLUME} is exported as {nqn} at {}\n", self.listen))?;
        let link = Link::connect(self.listen, &nqn)?;

        let mut lines = Vec::new();
        let head = self.resume(&link, &layout, &mut lines)?;
        let newest = self.prune()?;
        // Who rolled the volume back meanwhile finds the later checkpoints still there: the run goes on behind them.
        let first = head.max(newest) + 1;
        let good = first + CHECKPOINTS - 1;
        for number in first..=good {
            let follows = head > 0 && number == head + 1 || number > first;
            lines.push(self.checkpoint(&link, &layout, number, !follows)?);
        }
        let (kept, rollback) = self.go_wrong(&link, &layout, good, &mut lines)?;
        let (clone, cloning) = self.clone(good)?;
        let read_only = self.serve_read_only(&layout, good, &mut lines)?;

        let pool = self.call("pool_get", Arguments::new().with("name", POOL))?.0;
        let report = Report {
            lines,
            rollback,
            kept,
            cloning,
            clone,
            file_bytes: layout.file_len(),
            versions: self.made_snapshots()?.len() as u64,
            used_bytes: pool["allocated"].as_u64().unwrap_or(0) + pool["metadata"].as_u64().unwrap_or(0),
            nqn,
            read_only,
            listen: self.listen,
            time: started.elapsed(),
        };
        if self.format == Format::Json {
            return print(&format!("{:#}\n", report.to_json()));
        }
        print(&format!("\n{}\n{}", report.table(), report.sentences()))?;
        if self.once { Ok(()) } else { print(&report.whats_next(&self.socket, good)) }
    }

    /// Imports the pool of an earlier run, or creates one.
    fn bring_up_pool(&self) -> Result<(), Failure> {
        let file = self.dir.join("pool.img");
        if file.exists() {
            let uri = format!("uring:{}", file.display());
            let devices = Arguments::new().with("devices", vec![uri]);
            let info = self.call("pool_import", devices).map_err(|failure| about_file(failure, &file))?.0;
            self.say(&format!(
                "  pool {POOL} is imported from {} again: {} used\n",
                file.display(),
                bytes(info["allocated"].as_u64().unwrap_or(0))
            ))?;
            return Ok(());
        }
        let uri = format!("uring:{}?size={}", file.display(), self.pool_bytes);
        let arguments = Arguments::new().with("name", POOL).with("devices", vec![uri]);
        self.call("pool_create", arguments).map_err(|failure| about_file(failure, &file))?;
        self.say(&format!(
            "  pool {POOL} is created on {} ({}, sparse)\n",
            file.display(),
            format_size(self.pool_bytes)
        ))
    }

    fn volume(&self, layout: &Layout) -> Result<(), Failure> {
        let known = self.call("volume_get", Arguments::new().with("name", VOLUME));
        let size = match &known {
            Ok((volume, _)) => volume["size"].as_u64().unwrap_or(0),
            Err(_) => {
                let size = layout.blocks_len().next_multiple_of(1 << 30);
                self.call("volume_create", Arguments::new().with("name", VOLUME).with("size", size))?;
                self.say(&format!("  volume {VOLUME} of {} is created, thin\n", format_size(size)))?;
                size
            }
        };
        if size < layout.blocks_len() {
            let size = layout.blocks_len().next_multiple_of(1 << 30);
            self.call("volume_resize", Arguments::new().with("name", VOLUME).with("size", size))?;
        }
        Ok(())
    }

    /// Makes room: of what earlier runs made only the newest few checkpoints stay. Gives the newest one's number.
    fn prune(&self) -> Result<u64, Failure> {
        let volumes = self.call("volume_list", Arguments::new().with("pool", POOL))?.0;
        for clone in made::unused_clones(&volumes) {
            self.call("volume_delete", Arguments::new().with("name", clone))?;
        }
        let snapshots = self.made_snapshots()?;
        let mut gone = 0;
        for snapshot in made::superseded(&snapshots) {
            if snapshot.is_shown {
                let show = Arguments::new().with("name", snapshot.name.as_str());
                self.call("volume_unexport", show)?;
            }
            self.call("snapshot_delete", Arguments::new().with("name", snapshot.name.as_str()))?;
            gone += 1;
        }
        if gone > 0 {
            self.say(&format!("  of earlier runs {gone} snapshot(s) are deleted\n"))?;
        }
        Ok(snapshots
            .iter()
            .filter(|snapshot| !snapshot.is_bad)
            .map(|snapshot| snapshot.number)
            .max()
            .unwrap_or(0))
    }

    fn made_snapshots(&self) -> Result<Vec<made::Snapshot>, Failure> {
        let list = self.call("snapshot_list", Arguments::new().with("pool", POOL))?.0;
        Ok(made::snapshots(&list))
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
    fn checkpoint(&self, link: &Link, layout: &Layout, number: u64, whole: bool) -> Result<Line, Failure> {
        let (content, step) = (Content::Good { step: number }, number * STEPS);
        let written = write(link, layout, content, whole, &format!("writing step {step}"))?;
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
        let keep = made::bad_name(good + 1);
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
        let volumes = self.call("volume_list", Arguments::new().with("pool", POOL))?.0;
        let name = made::free_clone_name(&volumes, good);
        let arguments = Arguments::new().with("snapshot", snapshot_name(good)).with("name", name.as_str());
        let (_, time) = self.call("clone_create", arguments)?;
        Ok((name, time))
    }

    /// Exports the last good checkpoint read-only and compares it there.
    fn serve_read_only(&self, layout: &Layout, good: u64, lines: &mut Vec<Line>) -> Result<String, Failure> {
        let exported = self
            .call(
                "volume_export",
                Arguments::new()
                    .with("name", snapshot_name(good))
                    .with("nqn", made::read_only_nqn(good))
                    .with("listen", self.listen.to_string()),
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

    fn say(&self, text: &str) -> Result<(), Failure> {
        if self.format == Format::Table { print(text) } else { Ok(()) }
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
    failure.or_hint(format!("the pool's file is {}; --dir chooses another place", file.display()))
}

fn text(object: &Value, member: &str) -> String {
    object[member].as_str().unwrap_or_default().to_owned()
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
