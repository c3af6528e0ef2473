//! `rimrock snapshot send`: from a snapshot to a stream.
#![forbid(unsafe_code)]

use super::link::{Got, Link, Work};
use super::output::{Item, Output, WriteFault};
use super::{Piece, SHOW, Session, pieces, progress};
use crate::cli::client::Arguments;
use crate::cli::diff::{Range, parts};
use crate::cli::output::{Column, Format, Show, print_object};
use crate::cli::{Common, Failure};
use crate::stream::{Encoder, Header, RECORD_BYTES, Totals};
use crossbeam_channel::{Receiver, Sender, bounded};
use indicatif::ProgressBar;
use serde_json::{Value, json};
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use uuid::Uuid;

/// Pieces between the connection and the stream.
const QUEUE: usize = 16;

/// What is sent, and where to.
#[derive(Debug, clap::Args)]
pub struct SnapshotSend {
    /// The snapshot: NAME, POOL/NAME or UUID
    snapshot: String,
    /// Only what changed since this snapshot of the same pool
    #[arg(long, value_name = "SNAPSHOT")]
    from: Option<String>,
    /// Write to this file instead of standard output
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Replace FILE if it exists, when the new one is whole
    #[arg(long, requires = "file")]
    force: bool,
    /// Only tell how much it would be
    #[arg(short = 'n', long, conflicts_with_all = ["file", "force"])]
    dry_run: bool,
    /// Show no progress, and nothing at the end
    #[arg(short, long)]
    quiet: bool,
}

const SENT: &[Column] = &[
    ("name", "name", Show::Plain),
    ("pool", "pool", Show::Plain),
    ("uuid", "uuid", Show::Plain),
    ("since", "base", Show::Plain),
    ("size", "size", Show::Bytes),
    ("data", "data_bytes", Show::Bytes),
    ("became zero", "zero_bytes", Show::Bytes),
    ("stream", "stream_bytes", Show::Bytes),
    ("file", "file", Show::Plain),
    ("seconds", "seconds", Show::Plain),
    ("MiB/s", "mib_per_s", Show::Plain),
];

impl SnapshotSend {
    /// Runs the command.
    pub fn run(self, common: &Common) -> Result<(), Failure> {
        let output = match (&self.file, self.dry_run) {
            (_, true) => None,
            (Some(path), _) => Some(Arc::new(Output::file(path, self.force)?)),
            (None, _) => Some(Arc::new(Output::stdout()?)),
        };
        let started = Instant::now();
        let sent = self.send(common, output.as_ref());
        match output {
            None => print_object(common.output, &sent?, SENT),
            Some(output) => {
                let mut sent = match sent {
                    Ok(sent) => sent,
                    Err(failure) => {
                        output.discard();
                        return Err(failure);
                    }
                };
                output.keep().map_err(WriteFault::Io)?;
                let seconds = started.elapsed().as_secs_f64();
                let mib = sent["stream_bytes"].as_u64().unwrap_or(0) as f64 / f64::from(1 << 20);
                sent["file"] = json!(self.file);
                sent["seconds"] = json!((seconds * 1000.0).round() / 1000.0);
                sent["mib_per_s"] = json!((mib / seconds.max(1e-9)).round());
                self.tell(common.output, &sent)
            }
        }
    }

    /// At the end: on standard output if that does not carry the stream.
    fn tell(&self, format: Format, sent: &Value) -> Result<(), Failure> {
        match (self.quiet, &self.file, format) {
            (true, ..) => Ok(()),
            (_, Some(_), _) => print_object(format, sent, SENT),
            (_, None, Format::Json) => {
                // Nobody need read it: the stream is whole.
                drop(writeln!(std::io::stderr(), "{sent:#}"));
                Ok(())
            }
            (_, None, Format::Table) => Ok(()),
        }
    }

    fn send(&self, common: &Common, output: Option<&Arc<Output>>) -> Result<Value, Failure> {
        let arguments =
            Arguments::new().with("name", self.snapshot.as_str()).maybe("from", self.from.as_deref());
        let (session, answer) = Session::begin(common, "snapshot_send_begin", arguments)?;
        // The connection keeps the transfer alive, also while it is only counted.
        let link = Link::open(&answer)?;
        let ranges = Ranges { common, answer: &answer };
        let totals = ranges.count(progress(None, "looking", self.quiet))?;
        let header = header(&answer, &totals)?;
        let sum = stream_bytes(&header, &totals)?;
        if let Some(output) = output {
            let bar = progress(Some(totals.data_bytes), "sending", self.quiet);
            let sent = transfer(&link, &ranges, &header, output, &bar);
            bar.finish_and_clear();
            if sent? != totals {
                return Err(Failure::failed("the daemon gave other ranges than it had counted"));
            }
        }
        drop(session);
        Ok(json!({
            "name": header.name,
            "pool": header.pool_name,
            "uuid": header.uuid,
            "base": header.base,
            "stream": header.stream,
            "size": header.size,
            "block_size": header.block_size,
            "created": header.created,
            "data_bytes": totals.data_bytes,
            "zero_bytes": totals.zero_bytes,
            "records": totals.data_records + totals.zero_records,
            "stream_bytes": sum,
        }))
    }
}

/// The ranges to be sent, as the daemon tells them.
struct Ranges<'a> {
    common: &'a Common,
    answer: &'a Value,
}

impl Ranges<'_> {
    /// Each range, in ascending order; the same each time, since neither snapshot can change.
    fn each(&self, found: impl FnMut(Range) -> Result<(), Failure>) -> Result<(), Failure> {
        // By UUID: a name could be another's by now.
        let uuid = |name: &str| self.answer[name].as_str().map(|uuid| self.whole(uuid));
        let arguments = || Arguments::new().maybe("from", uuid("base")).maybe("to", uuid("uuid"));
        parts(self.common, "snapshot_diff", arguments, found)
    }

    fn whole(&self, uuid: &str) -> String {
        format!("{}/{uuid}", self.answer["pool"].as_str().unwrap_or_default())
    }

    fn count(&self, bar: ProgressBar) -> Result<Totals, Failure> {
        let mut totals = Totals::default();
        self.each(|range| {
            match range.is_data {
                true => {
                    totals.data_records += pieces(range.offset, range.length).count() as u64;
                    totals.data_bytes += range.length;
                }
                false => {
                    totals.zero_records += 1;
                    totals.zero_bytes += range.length;
                }
            }
            bar.set_position(totals.data_bytes);
            Ok(())
        })?;
        bar.finish_and_clear();
        Ok(totals)
    }
}

/// Reads what there is and has it written.
fn transfer(
    link: &Link,
    ranges: &Ranges<'_>,
    header: &Header,
    output: &Arc<Output>,
    bar: &ProgressBar,
) -> Result<Totals, Failure> {
    let (items, to_write) = bounded(QUEUE);
    let (spare, returned) = bounded(2 * QUEUE);
    let (output, header) = (Arc::clone(output), header.clone());
    let writer = std::thread::spawn(move || output.write(&header, &to_write, &spare));
    let read = read_all(link, ranges, items, &returned, bar);
    if let Err(Some(failure)) = read {
        // The other side may be waiting for a reader who never comes, and nobody waits for it.
        return Err(failure);
    }
    let written = writer.join().unwrap_or(Err(WriteFault::BrokenOff))?;
    match read {
        Ok(()) => Ok(written),
        // Where reading broke off because nobody writes any more, the reason was said above.
        Err(_) => Err(WriteFault::BrokenOff.into()),
    }
}

/// Reads everything. `Err(None)`: nobody takes it.
fn read_all(
    link: &Link,
    ranges: &Ranges<'_>,
    items: Sender<Item>,
    returned: &Receiver<Vec<u8>>,
    bar: &ProgressBar,
) -> Result<(), Option<Failure>> {
    let mut work = link.work();
    let mut shown = Instant::now();
    let mut pass_on = |work: &mut Work<'_>| -> Result<bool, Failure> {
        let item = match work.next()? {
            Some(Got::Data(piece, data)) => Item::Data(piece.offset, data),
            Some(Got::Zero(piece)) => Item::Zero(piece.offset, piece.length),
            Some(Got::Written(_)) => return Ok(true),
            None => return Ok(false),
        };
        let length = if let Item::Data(_, data) = &item { data.len() as u64 } else { 0 };
        items.send(item).map_err(|_| Failure::unread())?;
        bar.inc(length);
        if shown.elapsed() > SHOW {
            bar.tick();
            shown = Instant::now();
        }
        Ok(true)
    };
    let read = ranges.each(|range| {
        if !range.is_data {
            while work.is_full() {
                pass_on(&mut work)?;
            }
            work.pass(Piece { offset: range.offset, length: range.length });
            return Ok(());
        }
        for piece in pieces(range.offset, range.length) {
            while work.is_full() {
                pass_on(&mut work)?;
            }
            work.read(piece, returned.try_recv().unwrap_or_default())?;
        }
        Ok(())
    });
    let read = read.and_then(|()| {
        while pass_on(&mut work)? {}
        Ok(())
    });
    read.map_err(|failure| (!failure.is_unread()).then_some(failure))
}

fn header(answer: &Value, totals: &Totals) -> Result<Header, Failure> {
    let missing = |name: &str| Failure::failed(format!("the daemon does not tell the snapshot's {name}"));
    let word = |name: &str| answer[name].as_str().map(str::to_owned).ok_or_else(|| missing(name));
    let number = |name: &str| answer[name].as_u64().ok_or_else(|| missing(name));
    let uuid = |name: &str| word(name).and_then(|text| Uuid::try_parse(&text).map_err(|_| missing(name)));
    Ok(Header {
        stream: Uuid::new_v4(),
        uuid: uuid("uuid")?,
        base: if answer["base"].is_null() { None } else { Some(uuid("base")?) },
        pool: uuid("pool_uuid")?,
        name: word("name")?,
        pool_name: word("pool")?,
        size: number("size")?,
        block_size: number("block_size")? as u32,
        created: number("created")?,
        epoch: answer["epoch"].as_u64().unwrap_or(0),
        data_bytes: totals.data_bytes,
        zero_bytes: totals.zero_bytes,
    })
}

/// The bytes of the whole stream.
fn stream_bytes(header: &Header, totals: &Totals) -> Result<u64, Failure> {
    let (_, first) = Encoder::new(header).map_err(|error| Failure::from(WriteFault::Stream(error)))?;
    let empty = Header { data_bytes: 0, zero_bytes: 0, ..header.clone() };
    let end = Encoder::new(&empty).and_then(|(encoder, _)| encoder.end());
    let end = end.map_err(|error| Failure::from(WriteFault::Stream(error)))?;
    let records = (totals.data_records + totals.zero_records) * RECORD_BYTES as u64;
    Ok(first.len() as u64 + records + totals.data_bytes + end.len() as u64)
}
