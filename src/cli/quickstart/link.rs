//! The host's side of the quickstart: checkpoints written and compared through NVMe/TCP.
//!
//! One blocking queue with a few commands in flight, as a training job's writer would have.
#![forbid(unsafe_code)]

use super::checkpoint::{Content, Layout};
use crate::cli::Failure;
use crate::host::blocking::{self, BlockingController, Ticket};
use crate::host::{ControllerOptions, Data, HostError, Namespace};
use crate::nvme::Status;
use crate::nvme::base::nvm;
use crate::nvme::command::ReadWrite;
use std::collections::VecDeque;
use std::net::SocketAddr;
use uuid::Uuid;

/// Commands in flight.
const DEPTH: usize = 8;
/// Bytes of one command, or less if the controller takes less.
const CHUNK_BYTES: usize = 512 << 10;

/// What is done with the offset and the content of each read.
type Done<'a> = dyn FnMut(u64, &[u8]) -> Result<(), Failure> + 'a;

/// A connected namespace.
pub struct Link {
    controller: BlockingController,
    namespace: Namespace,
    chunk: usize,
}

impl Link {
    /// Connects to the first namespace of a subsystem.
    pub fn connect(address: SocketAddr, nqn: &str) -> Result<Link, Failure> {
        let options = ControllerOptions { depth: DEPTH as u16, ..ControllerOptions::new(Uuid::new_v4()) };
        let failed =
            |error: HostError| Failure::failed(format!("cannot connect to {nqn} at {address}: {error}"));
        let controller = blocking::connect(address, nqn, &options).map_err(failed)?;
        let namespace = blocking::now(controller.namespace(1)).map_err(failed)?;
        let chunk = CHUNK_BYTES.min(controller.transfer_bytes_max());
        Ok(Link { controller, namespace, chunk })
    }

    /// The first bytes.
    pub fn read_head(&self, len: u64) -> Result<Vec<u8>, Failure> {
        let (result, data) = blocking::now(self.controller.read(&self.namespace, 0, vec![0; len as usize]));
        result.map_err(|error| Failure::failed(format!("cannot read the volume: {error}")))?;
        Ok(data)
    }

    /// Writes the ranges of a checkpoint and flushes. Gives the bytes written.
    pub fn write(
        &self,
        layout: &Layout,
        content: Content,
        ranges: &[(u64, u64)],
        progress: &dyn Fn(u64),
    ) -> Result<u64, Failure> {
        let mut flight = VecDeque::new();
        let mut written = 0;
        for (offset, len) in self.pieces(ranges) {
            let mut data = self.spare(&mut flight, "write", &mut |_, _| Ok(()))?;
            data.resize(len, 0);
            layout.fill(content, offset, &mut data);
            self.submit(&mut flight, nvm::WRITE, offset, Data::Out(data))?;
            written += len as u64;
            progress(len as u64);
        }
        while !flight.is_empty() {
            self.settle(&mut flight, "write", &mut |_, _| Ok(()))?;
        }
        blocking::now(self.controller.flush(&self.namespace))
            .map_err(|error| Failure::failed(format!("the flush after the checkpoint failed: {error}")))?;
        Ok(written)
    }

    /// Reads a whole checkpoint and compares every byte. Gives the bytes compared.
    pub fn verify(&self, layout: &Layout, content: Content, progress: &dyn Fn(u64)) -> Result<u64, Failure> {
        let mut flight = VecDeque::new();
        let mut expected = Vec::new();
        let mut compared = 0;
        let mut compare = |offset: u64, data: &[u8]| {
            expected.resize(data.len(), 0);
            layout.fill(content, offset, &mut expected);
            progress(data.len() as u64);
            compared += data.len() as u64;
            match data.iter().zip(&expected).position(|(got, wanted)| got != wanted) {
                None => Ok(()),
                Some(at) => Err(Failure::failed(format!(
                    "byte {} is 0x{:02x}, the checkpoint has 0x{:02x} there",
                    offset + at as u64,
                    data[at],
                    expected[at]
                ))),
            }
        };
        for (offset, len) in self.pieces(&[(0, layout.blocks_len())]) {
            let mut data = self.spare(&mut flight, "read", &mut compare)?;
            data.resize(len, 0);
            self.submit(&mut flight, nvm::READ, offset, Data::In(data))?;
        }
        while !flight.is_empty() {
            self.settle(&mut flight, "read", &mut compare)?;
        }
        Ok(compared)
    }

    /// Whether a write is refused because the namespace is read-only.
    pub fn refuses_writes(&self) -> bool {
        let block = vec![0; self.namespace.block_bytes as usize];
        let written = blocking::now(self.controller.write(&self.namespace, 0, block, false));
        written.is_err_and(|error| {
            error.status().is_some_and(|status| {
                status.is(Status::NAMESPACE_WRITE_PROTECTED) || status.is(Status::WRITE_TO_READ_ONLY_RANGE)
            })
        })
    }

    fn pieces(&self, ranges: &[(u64, u64)]) -> Vec<(u64, usize)> {
        let mut pieces = Vec::new();
        for (start, len) in ranges {
            let mut at = *start;
            while at < start + len {
                let piece = (self.chunk as u64).min(start + len - at);
                pieces.push((at, piece as usize));
                at += piece;
            }
        }
        pieces
    }

    fn submit(
        &self,
        flight: &mut VecDeque<(u64, Ticket)>,
        opcode: u8,
        offset: u64,
        data: blocking::Bytes,
    ) -> Result<(), Failure> {
        let len = match &data {
            Data::In(bytes) | Data::Out(bytes) => bytes.len() as u64,
            Data::None => 0,
        };
        let block = u64::from(self.namespace.block_bytes);
        let command = ReadWrite::new(self.namespace.nsid, offset / block, (len / block) as u32);
        let ticket = self.controller.io_queues()[0].submit(command.to_sqe(opcode), data);
        let ticket = ticket.map_err(|error| Failure::failed(format!("the connection broke: {error}")))?;
        flight.push_back((offset, ticket));
        Ok(())
    }

    /// A buffer: a new one while the queue is not full, else that of the oldest command.
    fn spare(
        &self,
        flight: &mut VecDeque<(u64, Ticket)>,
        what: &str,
        done: &mut Done<'_>,
    ) -> Result<Vec<u8>, Failure> {
        if flight.len() < DEPTH { Ok(Vec::new()) } else { self.settle(flight, what, done) }
    }

    /// Waits for the oldest command and gives its buffer.
    fn settle(
        &self,
        flight: &mut VecDeque<(u64, Ticket)>,
        what: &str,
        done: &mut Done<'_>,
    ) -> Result<Vec<u8>, Failure> {
        let Some((offset, ticket)) = flight.pop_front() else { return Ok(Vec::new()) };
        let (result, data) = self.controller.io_queues()[0].wait(ticket);
        let failed = |why: String| Failure::failed(format!("the {what} at byte {offset} failed: {why}"));
        let status = result.map_err(|error| failed(error.to_string()))?.status();
        if !status.is_success() {
            return Err(failed(status.to_string()));
        }
        match data {
            Data::In(bytes) => {
                done(offset, &bytes)?;
                Ok(bytes)
            }
            Data::Out(bytes) => Ok(bytes),
            Data::None => Ok(Vec::new()),
        }
    }
}
