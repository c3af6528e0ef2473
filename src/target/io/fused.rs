//! Fused operations: Compare and Write, the only pair there is (Base 2.0, 6.2; NVM 1.0, 2.1.4).
//!
//! ```text
//!   Compare, FUSE 01b ──▶ held ──the next command──┬─ Write, FUSE 10b, same range ─▶ one job, two answers
//!                                                  └─ anything else ─▶ Missing Fused
//! ```
//!
//! Neither half asks for memory before both are there, so a half that waits for ever holds nothing but its identifier and
//! what came in its capsule. Data of both is asked for at the same time.
#![forbid(unsafe_code)]

use super::buffers::Need;
use super::{Inline, IoQueue, Slot};
use crate::memory::{BUFFER_ALIGN, DmaBuf, DmaSlice};
use crate::nvme::base::{SglKind, Sqe, nvm};
use crate::nvme::command::ReadWrite;
use crate::nvme::status::Status;
use crate::target::connection::Connection;
use crate::target::job::{NamespaceRef, Work};
use crate::target::transfer::{Arrived, WAITING_MAX};

/// FUSE of the two halves (Base figure 87).
const FIRST: u8 = 1;
const SECOND: u8 = 2;
/// The longest range of a pair, bytes.
const FUSED_BYTES_MAX: u32 = 128 << 10;

/// What is known of a pair of which only the first half may have come.
pub(super) enum First {
    None,
    Held(Compare),
    /// It has been answered: it failed.
    Failed,
}

/// A first half that waits for the second.
pub(super) struct Compare {
    pub(super) cid: u16,
    command: ReadWrite,
    data: Source,
}

/// Where a half's data is.
enum Source {
    Here(DmaSlice),
    /// At the host.
    Remote,
}

pub(super) struct Half {
    pub(super) cid: u16,
    data: Source,
}

/// Two halves with one range.
pub(super) struct Pair {
    offset: u64,
    len: usize,
    fua: bool,
    pub(super) compare: Half,
    pub(super) write: Half,
    scratch: Option<DmaBuf>,
    /// Where the data of the write is waited for.
    write_slot: Option<u32>,
}

impl Pair {
    pub(super) fn has(&self, cid: u16) -> bool {
        self.compare.cid == cid || self.write.cid == cid
    }

    fn remote_halves(&self) -> usize {
        [&self.compare, &self.write].into_iter().filter(|half| matches!(half.data, Source::Remote)).count()
    }

    /// Bytes of memory for one half; each begins where a device can begin.
    fn step(&self) -> usize {
        self.len.next_multiple_of(BUFFER_ALIGN)
    }

    /// Bytes of memory that it needs: for data to come, and to read what is there.
    pub(super) fn memory(&self) -> usize {
        (self.remote_halves() + 1) * self.step()
    }
}

impl IoQueue {
    /// A command that is half of a pair, or comes where a second half should.
    pub(super) fn on_fused(&mut self, conn: &mut Connection, sqe: &Sqe, cid: u16, inline: Inline<'_>) {
        let fuse = sqe.command_flags().fuse();
        let before = std::mem::replace(&mut self.first, First::None);
        match before {
            First::Held(first) if fuse == SECOND => return self.pair_up(conn, first, sqe, cid, inline),
            First::Failed if fuse == SECOND => return self.end(conn, cid, Status::ABORTED_FAILED_FUSED),
            First::Held(first) => self.end(conn, first.cid, Status::ABORTED_MISSING_FUSED.with_dnr()),
            First::Failed | First::None => {}
        }
        match fuse {
            0 => self.start_or_refuse(conn, sqe, cid, inline),
            FIRST => match self.check_first(sqe, cid, inline) {
                Ok(first) => self.first = First::Held(first),
                Err(status) => {
                    self.first = First::Failed;
                    self.end(conn, cid, status);
                }
            },
            SECOND => self.end(conn, cid, Status::ABORTED_MISSING_FUSED.with_dnr()),
            _ => self.end(conn, cid, Status::INVALID_FIELD.with_dnr()),
        }
    }

    /// A command of another kind has come: a first half that waits has no second.
    pub fn break_pair(&mut self, conn: &mut Connection) {
        if let First::Held(first) = std::mem::replace(&mut self.first, First::None) {
            self.end(conn, first.cid, Status::ABORTED_MISSING_FUSED.with_dnr());
        }
    }

    fn check_first(&mut self, sqe: &Sqe, cid: u16, inline: Inline<'_>) -> Result<Compare, Status> {
        if sqe.opcode != nvm::COMPARE {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        if !inline.intact {
            return Err(Status::TRANSIENT_TRANSPORT_ERROR);
        }
        let command = ReadWrite::parse(sqe);
        let (_, len) = self.transfer_range(&self.namespace(command.nsid)?, &command)?;
        if len > FUSED_BYTES_MAX {
            return Err(Status::ATOMIC_WRITE_UNIT_EXCEEDED.with_dnr());
        }
        // The namespace is looked for again: until then it may go.
        Ok(Compare { cid, command, data: self.half_data(sqe, len, inline)? })
    }

    fn half_data(&mut self, sqe: &Sqe, len: u32, inline: Inline<'_>) -> Result<Source, Status> {
        match self.check_host_data(sqe, len..=len, &inline)? {
            SglKind::InCapsule => Ok(Source::Here(self.copy_inline(&inline.chunk[inline.range]))),
            _ => Ok(Source::Remote),
        }
    }

    fn pair_up(&mut self, conn: &mut Connection, first: Compare, sqe: &Sqe, cid: u16, inline: Inline<'_>) {
        let compare = Half { cid: first.cid, data: first.data };
        match self.check_second(&first.command, sqe, inline) {
            Ok((namespace, offset, len, data)) => {
                let command = ReadWrite::parse(sqe);
                // What a comparison finds is durable once the write is.
                let fua = self.must_be_durable(&namespace, command.fua || first.command.fua);
                let write = Half { cid, data };
                let pair =
                    Pair { offset, len: len as usize, fua, compare, write, scratch: None, write_slot: None };
                let first_cid = pair.compare.cid;
                self.start_with_buffer(conn, first_cid, namespace, Need::Pair(Box::new(pair)));
            }
            Err(status) => {
                self.end(conn, compare.cid, Status::ABORTED_FAILED_FUSED);
                self.end(conn, cid, status);
            }
        }
    }

    fn check_second(
        &mut self,
        first: &ReadWrite,
        sqe: &Sqe,
        inline: Inline<'_>,
    ) -> Result<(NamespaceRef, u64, u32, Source), Status> {
        if sqe.opcode != nvm::WRITE {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        if !inline.intact {
            return Err(Status::TRANSIENT_TRANSPORT_ERROR);
        }
        let command = ReadWrite::parse(sqe);
        if (command.nsid, command.slba, command.blocks) != (first.nsid, first.slba, first.blocks) {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let namespace = self.namespace(command.nsid)?;
        let (offset, len) = self.transfer_range(&namespace, &command)?;
        if namespace.read_only {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
        }
        let data = self.half_data(sqe, len, inline)?;
        Ok((namespace, offset, len, data))
    }

    /// Asks for the data of a pair that has memory, or runs it.
    pub(super) fn start_pair(
        &mut self,
        conn: &mut Connection,
        slot: Option<u32>,
        namespace: NamespaceRef,
        mut pair: Box<Pair>,
        mut buf: DmaBuf,
    ) {
        let slot = slot.unwrap_or_else(|| self.occupy(Slot::Free));
        if conn.transfers_waiting() + pair.remote_halves() > WAITING_MAX {
            // Too few transfer tags are left: wait for them like for memory.
            let cid = pair.compare.cid;
            self.slots[slot as usize] = Slot::Waiting { cid, namespace, need: Need::Pair(pair) };
            return self.waiting.push_front(slot);
        }
        let (step, len) = (pair.step(), pair.len);
        let mut piece = || {
            let mut piece = buf.split_to(step);
            piece.truncate(len);
            piece
        };
        pair.scratch = Some(piece());
        let mut asked = true;
        if matches!(pair.compare.data, Source::Remote) {
            asked &= conn.request_data(slot, pair.compare.cid, piece()).is_ok();
        }
        if matches!(pair.write.data, Source::Remote) {
            let write_slot = self.occupy(Slot::PairHalf { pair: slot });
            pair.write_slot = Some(write_slot);
            asked &= conn.request_data(write_slot, pair.write.cid, piece()).is_ok();
        }
        self.slots[slot as usize] = Slot::PairData { namespace, pair };
        if !asked {
            // There were tags enough a moment ago.
            return self.give_up(conn, slot, Status::COMMAND_INTERRUPTED, None);
        }
        self.run_pair_if_whole(slot);
    }

    /// Data of a half is here.
    pub(super) fn on_pair_data(&mut self, conn: &mut Connection, arrived: Arrived) {
        let token = arrived.token;
        let slot = match self.slots.get(token as usize) {
            Some(Slot::PairHalf { pair }) => *pair,
            _ => token,
        };
        let Some(Slot::PairData { pair, .. }) = self.slots.get_mut(slot as usize) else { return };
        let half = if token == slot { &mut pair.compare } else { &mut pair.write };
        if !arrived.intact {
            let cid = half.cid;
            return self.give_up(conn, slot, Status::TRANSIENT_TRANSPORT_ERROR, Some(cid));
        }
        half.data = Source::Here(arrived.buf.freeze());
        self.run_pair_if_whole(slot);
    }

    fn run_pair_if_whole(&mut self, slot: u32) {
        if !matches!(&self.slots[slot as usize], Slot::PairData { pair, .. } if pair.remote_halves() == 0) {
            return;
        }
        let Slot::PairData { namespace, pair } = self.take_slot(slot) else { return };
        let Pair { offset, fua, compare, write, scratch, write_slot, .. } = *pair;
        if let Some(write_slot) = write_slot {
            self.take_slot(write_slot);
        }
        if let (Source::Here(expected), Source::Here(data), Some(scratch)) =
            (compare.data, write.data, scratch)
        {
            let work = Work::CompareAndWrite { offset, expected, data, scratch, fua };
            self.run_with_second(compare.cid, Some(write.cid), namespace, work);
        }
    }

    /// Nobody waits for the pair's data any more.
    pub(super) fn abandon_pair(&mut self, conn: &mut Connection, slot: u32, pair: &Pair) {
        conn.abandon_data(slot);
        if let Some(write_slot) = pair.write_slot {
            conn.abandon_data(write_slot);
            self.take_slot(write_slot);
        }
    }
}
