//! I/O commands. Each call is one command: the caller stays within [`Controller::transfer_bytes_max`].
#![forbid(unsafe_code)]

use zerocopy::IntoBytes;

use super::{Controller, succeeded};
use crate::host::{CommandQueue, Data, HostError, Namespace};
use crate::nvme::Sqe;
use crate::nvme::base::nvm;
use crate::nvme::command::{Copy, CopyRange, DatasetManagement, DsmAttributes, DsmRange, ReadWrite};

/// Blocks that one command can name (NLB is 16 bits, 0's based).
pub const BLOCKS_MAX: u32 = 65536;
/// Ranges that one Dataset Management command can name.
pub const DSM_RANGES_MAX: usize = 256;
/// Ranges that one Copy command can name.
pub const COPY_RANGES_MAX: usize = 256;

impl<Q: CommandQueue> Controller<Q> {
    /// Reads whole blocks from `slba` on until `buf` is full.
    pub async fn read(&self, ns: &Namespace, slba: u64, buf: Q::In) -> (Result<(), HostError>, Q::In) {
        let sqe = match read_write(ns, slba, buf.len()) {
            Ok(rw) => rw.to_sqe(nvm::READ),
            Err(error) => return (Err(error), buf),
        };
        let queue = match self.next_io_queue() {
            Ok(queue) => queue,
            Err(error) => return (Err(error), buf),
        };
        let (result, data) = queue.execute(sqe, Data::In(buf)).await;
        let result = result.and_then(|cqe| succeeded("Read", cqe)).map(drop);
        match data {
            Data::In(buf) => (result, buf),
            // A queue gives back the buffer that it was given; an empty one stands in if it does not.
            _ => (result, Q::in_buffer(0)),
        }
    }

    /// Writes whole blocks from `slba` on; with `fua` they are durable when this returns.
    pub async fn write(&self, ns: &Namespace, slba: u64, data: Q::Out, fua: bool) -> Result<(), HostError> {
        let rw = ReadWrite { fua, ..read_write(ns, slba, data.len())? };
        self.io_command("Write", rw.to_sqe(nvm::WRITE), Data::Out(data)).await
    }

    /// Compares blocks with `data`; an error with status Compare Failure when they differ.
    pub async fn compare(&self, ns: &Namespace, slba: u64, data: Q::Out) -> Result<(), HostError> {
        let rw = read_write(ns, slba, data.len())?;
        self.io_command("Compare", rw.to_sqe(nvm::COMPARE), Data::Out(data)).await
    }

    /// Has the controller read `blocks` blocks and check them, without sending them.
    pub async fn verify(&self, ns: &Namespace, slba: u64, blocks: u32) -> Result<(), HostError> {
        if blocks == 0 || blocks > BLOCKS_MAX {
            return Err(HostError::Invalid { what: "a command names 1 to 65536 blocks" });
        }
        self.io_command("Verify", ReadWrite::new(ns.nsid, slba, blocks).to_sqe(nvm::VERIFY), Data::None).await
    }

    /// Copies up to [`COPY_RANGES_MAX`] ranges of (first block, blocks), one after the other, to `to` on. The data stays with
    /// the controller, whose limits are in Identify Namespace: MSSRL, MCL and MSRC.
    pub async fn copy(
        &self,
        ns: &Namespace,
        ranges: &[(u64, u32)],
        to: u64,
        fua: bool,
    ) -> Result<(), HostError> {
        if ranges.is_empty() || ranges.len() > COPY_RANGES_MAX {
            return Err(HostError::Invalid { what: "Copy takes 1 to 256 ranges" });
        }
        if ranges.iter().any(|&(_, blocks)| blocks == 0 || blocks > BLOCKS_MAX) {
            return Err(HostError::Invalid { what: "a range has 1 to 65536 blocks" });
        }
        let list: Vec<CopyRange> =
            ranges.iter().map(|&(slba, blocks)| CopyRange::new(slba, blocks)).collect();
        let command = Copy { nsid: ns.nsid, sdlba: to, ranges: list.len() as u16, format: 0, fua };
        self.io_command("Copy", command.to_sqe(), Data::Out(Q::out_buffer(list.as_bytes()))).await
    }

    /// Makes all completed writes of this namespace durable.
    pub async fn flush(&self, ns: &Namespace) -> Result<(), HostError> {
        self.io_command("Flush", Sqe::new(nvm::FLUSH, ns.nsid), Data::None).await
    }

    /// Makes `blocks` blocks read as zeros, without sending them; `deallocate` allows the space to be given back.
    pub async fn write_zeroes(
        &self,
        ns: &Namespace,
        slba: u64,
        blocks: u32,
        deallocate: bool,
    ) -> Result<(), HostError> {
        if blocks == 0 || blocks > BLOCKS_MAX {
            return Err(HostError::Invalid { what: "a command names 1 to 65536 blocks" });
        }
        let rw = ReadWrite { deallocate, ..ReadWrite::new(ns.nsid, slba, blocks) };
        self.io_command("Write Zeroes", rw.to_sqe(nvm::WRITE_ZEROES), Data::None).await
    }

    /// Gives the space of up to [`DSM_RANGES_MAX`] ranges of (first block, blocks) back.
    pub async fn deallocate(&self, ns: &Namespace, ranges: &[(u64, u32)]) -> Result<(), HostError> {
        if ranges.is_empty() || ranges.len() > DSM_RANGES_MAX {
            return Err(HostError::Invalid { what: "Dataset Management takes 1 to 256 ranges" });
        }
        let list: Vec<DsmRange> = ranges.iter().map(|&(slba, blocks)| DsmRange::new(slba, blocks)).collect();
        let command = DatasetManagement {
            nsid: ns.nsid,
            ranges: list.len() as u16,
            attributes: DsmAttributes(0).with_ad(true),
        };
        let data = Data::Out(Q::out_buffer(list.as_bytes()));
        self.io_command("Dataset Management", command.to_sqe(), data).await
    }

    async fn io_command(
        &self,
        name: &'static str,
        sqe: Sqe,
        data: Data<Q::In, Q::Out>,
    ) -> Result<(), HostError> {
        let (result, _) = self.next_io_queue()?.execute(sqe, data).await;
        succeeded(name, result?).map(drop)
    }
}

/// The range of blocks that `len` bytes from `slba` on are.
fn read_write(ns: &Namespace, slba: u64, len: usize) -> Result<ReadWrite, HostError> {
    let block = ns.block_bytes as usize;
    if len == 0 || !len.is_multiple_of(block) {
        return Err(HostError::Invalid { what: "the buffer is not a whole number of logical blocks" });
    }
    match u32::try_from(len / block) {
        Ok(blocks) if blocks <= BLOCKS_MAX => Ok(ReadWrite::new(ns.nsid, slba, blocks)),
        _ => Err(HostError::Invalid { what: "a command names 1 to 65536 blocks" }),
    }
}
