//! `rimrock snapshot receive`: from a stream to a snapshot.
#![forbid(unsafe_code)]

use super::check::check;
use super::input::{Input, ReadFault};
use super::link::{Got, Link, Work};
use super::proof::{Digest, Proof};
use super::{Piece, SHOW, Session, pieces, progress};
use crate::cli::client::{Arguments, call};
use crate::cli::diff::{Range, parts};
use crate::cli::output::{Format, print_json, print_object};
use crate::cli::volume::{SHOW as SNAPSHOT, split};
use crate::cli::{Common, Failure};
use crate::stream::{Event, Header};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use indicatif::ProgressBar;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Records between the stream and the connection.
const QUEUE: usize = 16;

type Events = Receiver<Result<Event, ReadFault>>;

/// What is received, and as what.
#[derive(Debug, clap::Args)]
pub struct SnapshotReceive {
    /// The snapshot's name here, or POOL/NAME [default: the one it was sent with]
    name: Option<String>,
    /// The pool [default: the only one]
    #[arg(long)]
    pool: Option<String>,
    /// Read this file instead of standard input
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Only tell whether the stream in this file is whole, without a daemon; `-` is standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["name", "pool", "file"])]
    check: Option<PathBuf>,
    /// Show no progress, and nothing at the end
    #[arg(short, long)]
    quiet: bool,
}

impl SnapshotReceive {
    /// Runs the command.
    pub fn run(self, common: &Common) -> Result<(), Failure> {
        if let Some(path) = &self.check {
            let path = Some(path.as_path()).filter(|path| *path != Path::new("-"));
            return check(Input::open(path)?, common.output, self.quiet);
        }
        let input = Input::open(self.file.as_deref())?;
        let (events, to_write) = bounded(QUEUE);
        let (spare, returned) = bounded(2 * QUEUE);
        // Nobody waits for it: when this side fails, the other may be waiting for bytes that never come.
        std::thread::spawn(move || input.decode(&events, &returned));
        let snapshot = self.receive(common, &to_write, &spare)?;
        match (self.quiet, common.output) {
            (true, _) => Ok(()),
            (_, Format::Json) => print_json(&snapshot),
            (_, Format::Table) => print_object(common.output, &snapshot, SNAPSHOT),
        }
    }

    fn receive(&self, common: &Common, events: &Events, spare: &Sender<Vec<u8>>) -> Result<Value, Failure> {
        let header = match next(events, None)? {
            Some(Event::Header(header)) => header,
            _ => return Err(Failure::failed("the stream does not begin with its header")),
        };
        let (session, answer) = Session::begin(common, "snapshot_receive_begin", self.arguments(&header)?)?;
        let link = Link::open(&answer)?;
        let bar = progress(Some(header.data_bytes), "receiving", self.quiet);
        let sent = fill(&link, events, spare, &bar);
        bar.finish_and_clear();
        let sent = sent?;
        link.flush()?;
        let bar = progress(Some(header.data_bytes), "verifying", self.quiet);
        let found = read_back(common, &session, &link, &bar);
        bar.finish_and_clear();
        if found? != sent {
            return Err(Failure::failed("what was written is not what came; it is deleted again")
                .hint("this is a fault of the appliance or of its devices: `rimrock pool check --data`"));
        }
        let snapshot = call(common, "snapshot_receive_commit", session.arguments())?;
        session.forget();
        Ok(snapshot)
    }

    fn arguments(&self, header: &Header) -> Result<Arguments, Failure> {
        let (pool, name) = self.name.as_deref().map_or((None, header.name.as_str()), split);
        if let (Some(one), Some(other)) = (pool, self.pool.as_deref())
            && one != other
        {
            return Err(Failure::usage(format!("--pool {other} contradicts {one}/{name}")));
        }
        Ok(Arguments::new()
            .with("name", name)
            .maybe("pool", pool.or(self.pool.as_deref()))
            .with("uuid", header.uuid.to_string())
            .maybe("base", header.base.map(|base| base.to_string()))
            .with("size", header.size)
            .with("block_size", header.block_size)
            .with("created", header.created)
            .with("data_bytes", header.data_bytes))
    }
}

/// What comes next in the stream; `None` when it stopped without a word.
fn next(events: &Events, bar: Option<&ProgressBar>) -> Result<Option<Event>, Failure> {
    loop {
        match events.recv_timeout(SHOW) {
            Ok(event) => return Ok(Some(event?)),
            // Whoever sends is slow, and the rate falls.
            Err(RecvTimeoutError::Timeout) => bar.into_iter().for_each(ProgressBar::tick),
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
        }
    }
}

/// Writes what comes, up to the end of the stream, and gives the proof of what came.
fn fill(link: &Link, events: &Events, spare: &Sender<Vec<u8>>, bar: &ProgressBar) -> Result<Digest, Failure> {
    let (mut work, mut proof) = (link.work(), Proof::new());
    let settle = |work: &mut Work<'_>| -> Result<bool, Failure> {
        match work.next()? {
            Some(Got::Written(buffer)) => drop(spare.try_send(buffer)),
            Some(_) => {}
            None => return Ok(false),
        }
        Ok(true)
    };
    loop {
        // A write goes on only while somebody waits for it: not only when there is no room, but also when the stream is
        // slow.
        while work.is_full() || events.is_empty() {
            if !settle(&mut work)? {
                break;
            }
        }
        match next(events, Some(bar))? {
            Some(Event::Data { offset, data }) => {
                let length = data.len() as u64;
                proof.range(Range { offset, length, is_data: true });
                proof.data(&data);
                work.write(offset, data)?;
                bar.inc(length);
            }
            Some(Event::Zero { offset, length }) => {
                proof.range(Range { offset, length, is_data: false });
                work.deallocate(Piece { offset, length })?;
            }
            Some(Event::End(_)) => break,
            Some(Event::Header(_)) => return Err(Failure::failed("the stream has a second header")),
            None => return Err(Failure::failed("the stream stopped without its end")),
        }
    }
    while settle(&mut work)? {}
    Ok(proof.digest())
}

/// Reads back what the volume has that its base has not, and gives the proof of it.
fn read_back(
    common: &Common,
    session: &Session<'_>,
    link: &Link,
    bar: &ProgressBar,
) -> Result<Digest, Failure> {
    let (mut work, mut proof) = (link.work(), Proof::new());
    let mut spare: Vec<Vec<u8>> = Vec::new();
    parts(
        common,
        "snapshot_receive_diff",
        || session.arguments(),
        |range| {
            proof.range(range);
            if !range.is_data {
                return Ok(());
            }
            for piece in pieces(range.offset, range.length) {
                while work.is_full() {
                    spare.extend(take(&mut work, &mut proof, bar)?);
                }
                work.read(piece, spare.pop().unwrap_or_default())?;
            }
            Ok(())
        },
    )?;
    while take(&mut work, &mut proof, bar)?.is_some() {}
    Ok(proof.digest())
}

/// Waits for the piece that was asked for first, and gives its buffer back.
fn take(work: &mut Work<'_>, proof: &mut Proof, bar: &ProgressBar) -> Result<Option<Vec<u8>>, Failure> {
    match work.next()? {
        Some(Got::Data(piece, data)) => {
            proof.data(&data);
            bar.inc(piece.length);
            Ok(Some(data))
        }
        Some(_) => Err(Failure::failed("a read came back as something else")),
        None => Ok(None),
    }
}
