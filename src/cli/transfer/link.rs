//! The namespace that a transfer shows, read and written with several commands under way.
#![forbid(unsafe_code)]

use super::Piece;
use crate::cli::Failure;
use crate::host::blocking::{self, BlockingController, Queue, Ticket};
use crate::host::{ControllerOptions, Data, HostError, Namespace};
use crate::nvme::Status;
use crate::nvme::base::nvm;
use crate::nvme::command::{DatasetManagement, DsmAttributes, DsmRange, ReadWrite};
use crate::nvme::tcp::Digests;
use crate::stream::UNIT;
use serde_json::Value;
use std::collections::VecDeque;
use uuid::Uuid;
use zerocopy::IntoBytes;

/// Commands under way at most.
const DEPTH: u16 = 64;
/// Bytes of their data at most.
const BYTES_MAX: usize = 16 << 20;
/// Blocks that one range of Dataset Management names at most.
const RANGE_BLOCKS: u64 = 1 << 31;

/// A connection to what a transfer shows.
pub struct Link {
    controller: BlockingController,
    ns: Namespace,
}

/// Something that was asked for, in the order of asking.
enum Asked {
    Read(Piece, Ticket),
    Write(usize, Ticket),
    /// Nothing to wait for: it only keeps its place.
    Zero(Piece),
}

/// Commands under way on a link.
pub struct Work<'a> {
    link: &'a Link,
    asked: VecDeque<Asked>,
    bytes: usize,
}

/// What has been read, or was only passed through.
pub enum Got {
    /// The data of a piece.
    Data(Piece, Vec<u8>),
    /// A piece that became zero.
    Zero(Piece),
    /// A write is done; its buffer can be used again.
    Written(Vec<u8>),
}

impl Link {
    /// Connects to what the daemon's answer says is shown.
    pub fn open(answer: &Value) -> Result<Link, Failure> {
        let word = |name: &str| {
            let word = answer[name].as_str();
            word.ok_or_else(|| Failure::failed(format!("the daemon does not say which {name} the data has")))
        };
        let address =
            word("address")?.parse().map_err(|_| Failure::failed("the daemon's address is none"))?;
        let options = ControllerOptions {
            hostnqn: word("host_nqn")?.to_owned(),
            depth: DEPTH,
            // From the pool's own checksums to those of the stream, and back, no byte goes without one.
            digests: Digests(0).with_header(true).with_data(true),
            ..ControllerOptions::new(Uuid::new_v4())
        };
        let nsid = answer["nsid"].as_u64().and_then(|nsid| u32::try_from(nsid).ok()).unwrap_or(0);
        let controller = blocking::connect(address, word("nqn")?, &options).map_err(failed)?;
        let ns = blocking::now(controller.namespace(nsid)).map_err(failed)?;
        if u64::from(ns.block_bytes) != UNIT || controller.transfer_bytes_max() < crate::stream::DATA_MAX {
            return Err(Failure::failed(
                "the daemon shows the data in a form that this program does not know",
            ));
        }
        Ok(Link { controller, ns })
    }

    /// Begins to work.
    pub fn work(&self) -> Work<'_> {
        Work { link: self, asked: VecDeque::new(), bytes: 0 }
    }

    /// Makes what was written durable.
    pub fn flush(&self) -> Result<(), Failure> {
        blocking::now(self.controller.flush(&self.ns)).map_err(failed)
    }

    fn queue(&self) -> Result<&Queue, Failure> {
        self.controller.io_queues().first().ok_or_else(|| Failure::failed("the daemon grants no I/O queue"))
    }
}

impl Work<'_> {
    /// Whether as much is under way as may be: [`Work::next`] comes before anything else is asked for.
    pub fn is_full(&self) -> bool {
        self.asked.len() >= usize::from(DEPTH) || self.bytes >= BYTES_MAX
    }

    /// Asks for the data of a piece.
    pub fn read(&mut self, piece: Piece, mut buffer: Vec<u8>) -> Result<(), Failure> {
        let bytes = piece.length as usize;
        buffer.resize(bytes, 0);
        let sqe = self.transfer(piece).to_sqe(nvm::READ);
        let ticket = self.link.queue()?.submit(sqe, Data::In(buffer)).map_err(failed)?;
        self.asked.push_back(Asked::Read(piece, ticket));
        self.bytes += bytes;
        Ok(())
    }

    /// Passes a piece through that became zero, in its place between those that are read.
    pub fn pass(&mut self, piece: Piece) {
        self.asked.push_back(Asked::Zero(piece));
    }

    /// Writes data.
    pub fn write(&mut self, offset: u64, data: Vec<u8>) -> Result<(), Failure> {
        let bytes = data.len();
        let sqe = self.transfer(Piece { offset, length: bytes as u64 }).to_sqe(nvm::WRITE);
        let ticket = self.link.queue()?.submit(sqe, Data::Out(data)).map_err(failed)?;
        self.asked.push_back(Asked::Write(bytes, ticket));
        self.bytes += bytes;
        Ok(())
    }

    /// Makes ranges zero; their space comes back.
    pub fn deallocate(&mut self, piece: Piece) -> Result<(), Failure> {
        let (mut block, end) = (piece.offset / UNIT, (piece.offset + piece.length) / UNIT);
        let mut ranges = Vec::new();
        while block < end {
            let count = (end - block).min(RANGE_BLOCKS);
            ranges.push(DsmRange::new(block, count as u32));
            block += count;
        }
        let attributes = DsmAttributes(0).with_ad(true);
        // At most 2^51 blocks, the volume's size, in ranges of 2^31: what one command takes of them is far more than
        // any pool has.
        for ranges in ranges.chunks(256) {
            let nsid = self.link.ns.nsid;
            let sqe = DatasetManagement { nsid, ranges: ranges.len() as u16, attributes }.to_sqe();
            let ticket = self.link.queue()?.submit(sqe, Data::Out(ranges.as_bytes().to_vec()));
            self.asked.push_back(Asked::Write(0, ticket.map_err(failed)?));
        }
        Ok(())
    }

    /// Waits for what was asked for first. `None`: nothing is under way.
    pub fn next(&mut self) -> Result<Option<Got>, Failure> {
        let Some(asked) = self.asked.pop_front() else { return Ok(None) };
        let (ticket, piece) = match asked {
            Asked::Zero(piece) => return Ok(Some(Got::Zero(piece))),
            Asked::Read(piece, ticket) => {
                self.bytes -= piece.length as usize;
                (ticket, Some(piece))
            }
            Asked::Write(bytes, ticket) => {
                self.bytes -= bytes;
                (ticket, None)
            }
        };
        let (cqe, data) = self.link.queue()?.wait(ticket);
        let command = if piece.is_some() { "Read" } else { "Write" };
        let status = cqe.map_err(failed)?.status();
        if !status.is_success() {
            return Err(match piece {
                Some(piece) => unreadable(piece, status),
                None => failed(HostError::Status { command, status }),
            });
        }
        Ok(Some(match (piece, data) {
            (Some(piece), Data::In(data)) => Got::Data(piece, data),
            (_, Data::Out(data)) => Got::Written(data),
            _ => return Err(Failure::failed("a command came back without its data")),
        }))
    }

    fn transfer(&self, piece: Piece) -> ReadWrite {
        ReadWrite::new(self.link.ns.nsid, piece.offset / UNIT, (piece.length / UNIT) as u32)
    }
}

fn unreadable(piece: Piece, status: Status) -> Failure {
    let (offset, length) = (piece.offset, piece.length);
    Failure::failed(format!("{length} bytes at byte {offset} of the snapshot cannot be read: {status}"))
        .hint("`rimrock pool check --data` says what is damaged")
}

/// Why the connection or a command failed.
fn failed(error: HostError) -> Failure {
    match error.status() {
        Some(status) if status.is(Status::CAPACITY_EXCEEDED) => {
            Failure::failed("the pool is full; what was received is deleted again")
                .hint("make room, or add it up first with `rimrock snapshot send --dry-run`")
        }
        Some(_) => Failure::failed(format!("the daemon refused: {error}")),
        None => Failure::failed(format!("the daemon ended the transfer: {error}"))
            .hint("its log says why; nothing of what was transferred is visible"),
    }
}
