//! Where the data of I/O commands goes: buffers, waiting for them, and what is done once data is here.
//!
//! Commands that find no buffer wait in order of arrival. There is no state in which a command holds one buffer and waits
//! for another, so waiting ends whenever anything ends.
#![forbid(unsafe_code)]

use zerocopy::FromBytes;

use super::fused::Pair;
use super::{Inline, IoQueue, Slot};
use crate::memory::{BUFFER_ALIGN, DmaBuf, DmaSlice};
use crate::nvme::base::{SglKind, Sqe};
use crate::nvme::command::{Copy, DsmRange};
use crate::nvme::status::Status;
use crate::target::connection::Connection;
use crate::target::job::{NamespaceRef, Work};
use crate::target::transfer::Arrived;

/// What a waiting command needs a buffer for.
pub(super) enum Need {
    Read { offset: u64, len: u32, fua: bool },
    HostData { len: u32, then: AfterData },
    Verify { offset: u64, len: u64, fua: bool },
    Copy { sources: Box<[(u64, u64)]>, to: u64, len: u32, fua: bool },
    Pair(Box<Pair>),
}

pub(super) enum AfterData {
    Write {
        offset: u64,
        fua: bool,
    },
    Deallocate {
        ranges: u16,
    },
    /// Memory for what is there comes with that for the data.
    Compare {
        offset: u64,
        fua: bool,
        scratch: Option<DmaBuf>,
    },
    Copy(Copy),
}

/// What is read at a time of a long range that nobody is sent, bytes.
const SCRATCH_BYTES: usize = 128 << 10;

/// Bytes of memory for reading a range in pieces.
fn scratch_len(len: u64) -> usize {
    len.min(SCRATCH_BYTES as u64) as usize
}

impl IoQueue {
    #[allow(
        clippy::too_many_arguments,
        reason = "the parts of one command, on their way to one of three places"
    )]
    pub(super) fn start_with_host_data(
        &mut self,
        conn: &mut Connection,
        sqe: &Sqe,
        cid: u16,
        namespace: NamespaceRef,
        lengths: std::ops::RangeInclusive<u32>,
        inline: Inline<'_>,
        then: AfterData,
    ) -> Result<(), Status> {
        match self.check_host_data(sqe, lengths, &inline)? {
            SglKind::InCapsule => {
                let data = match then {
                    // Done with by the time the receive buffer is used again.
                    AfterData::Write { .. } if namespace.backend.takes_any_memory() => {
                        inline.chunk.slice(inline.range)
                    }
                    _ => self.copy_inline(&inline.chunk[inline.range]),
                };
                self.run_with_data(conn, cid, namespace, then, data)
            }
            _ => {
                let need = Need::HostData { len: sqe.dptr.length.get(), then };
                self.start_with_buffer(conn, cid, namespace, need);
                Ok(())
            }
        }
    }

    /// Where the data of a command is: in its capsule, which is what `inline` has, or still at the host.
    pub(super) fn check_host_data(
        &self,
        sqe: &Sqe,
        lengths: std::ops::RangeInclusive<u32>,
        inline: &Inline<'_>,
    ) -> Result<SglKind, Status> {
        let len = sqe.dptr.length.get();
        if !lengths.contains(&len) {
            return Err(Status::DATA_SGL_LENGTH_INVALID.with_dnr());
        }
        match sqe.data_kind()? {
            SglKind::InCapsule if sqe.dptr.address.get() != 0 => Err(Status::SGL_OFFSET_INVALID.with_dnr()),
            SglKind::InCapsule if inline.range.len() != len as usize => {
                Err(Status::DATA_SGL_LENGTH_INVALID.with_dnr())
            }
            SglKind::Other(_) => Err(Status::SGL_TYPE_INVALID.with_dnr()),
            kind => Ok(kind),
        }
    }

    pub(super) fn copy_inline(&mut self, data: &[u8]) -> DmaSlice {
        let spare = self.spare.take().filter(|spare| spare.len() >= data.len());
        let mut buf = spare.unwrap_or_else(|| DmaBuf::uninit(data.len()));
        buf.truncate(data.len());
        buf.copy_from_slice(data);
        buf.freeze()
    }

    pub(super) fn start_with_buffer(
        &mut self,
        conn: &mut Connection,
        cid: u16,
        namespace: NamespaceRef,
        need: Need,
    ) {
        let buf = if self.waiting.is_empty() { self.buffer(conn, &need) } else { None };
        match buf {
            Some(buf) => self.use_buffer(conn, None, cid, namespace, need, buf),
            None => {
                let slot = self.occupy(Slot::Waiting { cid, namespace, need });
                self.waiting.push_back(slot);
            }
        }
    }

    /// A buffer, if there is memory and the command's window is open. A window is always open for the first.
    pub(super) fn buffer(&mut self, conn: &Connection, need: &Need) -> Option<DmaBuf> {
        let held = self.held_with(conn);
        let (len, own) = match need {
            Need::Read { len, .. } => (*len as usize, held.read),
            Need::HostData { len, then: AfterData::Compare { .. } } => {
                let own = (*len as usize).next_multiple_of(BUFFER_ALIGN);
                (own + scratch_len((*len).into()), held.write)
            }
            Need::HostData { len, .. } => (*len as usize, held.write),
            Need::Verify { len, .. } => (scratch_len(*len), held.read),
            Need::Copy { len, .. } => (*len as usize, held.read),
            Need::Pair(pair) => (pair.memory(), held.write),
        };
        if !self.is_admitted(own, held.sum(), len) {
            return None;
        }
        let buf = DmaBuf::try_uninit(len);
        self.is_dry |= buf.is_none();
        buf
    }

    pub(super) fn use_buffer(
        &mut self,
        conn: &mut Connection,
        slot: Option<u32>,
        cid: u16,
        namespace: NamespaceRef,
        need: Need,
        mut buf: DmaBuf,
    ) {
        match need {
            Need::Read { offset, fua, .. } => {
                self.free_slot(slot);
                self.run(cid, namespace, Work::Read { offset, buf, fua });
            }
            Need::Verify { offset, len, fua } => {
                self.free_slot(slot);
                self.run(cid, namespace, Work::Verify { offset, len, scratch: buf, fua });
            }
            Need::Copy { sources, to, fua, .. } => {
                self.free_slot(slot);
                self.run(cid, namespace, Work::Copy { sources, to, buf, fua });
            }
            Need::Pair(pair) => self.start_pair(conn, slot, namespace, pair, buf),
            Need::HostData { len, mut then } => {
                if let AfterData::Compare { scratch, .. } = &mut then {
                    *scratch = Some(buf.split_off((len as usize).next_multiple_of(BUFFER_ALIGN)));
                    buf.truncate(len as usize);
                }
                let slot = match slot {
                    Some(slot) => {
                        self.slots[slot as usize] = Slot::Data { cid, namespace, then };
                        slot
                    }
                    None => self.occupy(Slot::Data { cid, namespace, then }),
                };
                if conn.request_data(slot, cid, buf).is_err()
                    && let Slot::Data { cid, namespace, then } = self.take_slot(slot)
                {
                    // Every transfer tag is in use: wait for one like for memory, and hold none meanwhile.
                    let then = match then {
                        AfterData::Compare { offset, fua, .. } => {
                            AfterData::Compare { offset, fua, scratch: None }
                        }
                        then => then,
                    };
                    let need = Need::HostData { len, then };
                    let slot = self.occupy(Slot::Waiting { cid, namespace, need });
                    self.waiting.push_front(slot);
                }
            }
        }
    }

    /// Starts commands that wait, in order, as far as there are buffers for them.
    pub fn resume_waiting(&mut self, conn: &mut Connection) {
        self.is_dry = false;
        while let Some(slot) = self.waiting.pop_front() {
            let taken = std::mem::replace(&mut self.slots[slot as usize], Slot::Free);
            let Slot::Waiting { cid, namespace, need } = taken else {
                self.slots[slot as usize] = taken;
                continue;
            };
            let Some(buf) = self.buffer(conn, &need) else {
                self.slots[slot as usize] = Slot::Waiting { cid, namespace, need };
                return self.waiting.push_front(slot);
            };
            let tags_left = self.waiting.len();
            self.use_buffer(conn, Some(slot), cid, namespace, need, buf);
            if self.waiting.len() > tags_left {
                return;
            }
        }
    }

    /// All data of a command is here.
    pub fn on_data(&mut self, conn: &mut Connection, arrived: Arrived) {
        if matches!(
            self.slots.get(arrived.token as usize),
            Some(Slot::PairData { .. } | Slot::PairHalf { .. })
        ) {
            return self.on_pair_data(conn, arrived);
        }
        let Slot::Data { cid, namespace, then } = self.take_slot(arrived.token) else { return };
        let outcome = match arrived.intact {
            true => self.run_with_data(conn, cid, namespace, then, arrived.buf.freeze()),
            false => Err(Status::TRANSIENT_TRANSPORT_ERROR),
        };
        if let Err(status) = outcome {
            self.end(conn, cid, status);
        }
    }

    pub(super) fn run_with_data(
        &mut self,
        conn: &mut Connection,
        cid: u16,
        namespace: NamespaceRef,
        then: AfterData,
        data: DmaSlice,
    ) -> Result<(), Status> {
        let work = match then {
            AfterData::Write { offset, fua } => Work::Write { offset, data, fua },
            AfterData::Deallocate { ranges } => {
                // All ranges are checked before anything is deallocated.
                let list = <[DsmRange]>::ref_from_prefix_with_elems(&data, ranges.into());
                let (list, _) = list.map_err(|_| Status::DATA_SGL_LENGTH_INVALID.with_dnr())?;
                let bytes = |range: &DsmRange| namespace.byte_range(range.slba.get(), range.nlb.get().into());
                let ranges: Option<Box<[_]>> = list.iter().map(bytes).collect();
                Work::Deallocate { ranges: ranges.ok_or(Status::LBA_OUT_OF_RANGE.with_dnr())? }
            }
            AfterData::Compare { offset, fua, scratch } => {
                // What came in the capsule is little, and so is this.
                let scratch = scratch.unwrap_or_else(|| DmaBuf::uninit(scratch_len(data.len() as u64)));
                Work::Compare { offset, expected: data, scratch, fua }
            }
            AfterData::Copy(copy) => {
                let need = self.check_copy(&namespace, &copy, &data)?;
                drop(data);
                self.start_with_buffer(conn, cid, namespace, need);
                return Ok(());
            }
        };
        self.run(cid, namespace, work);
        Ok(())
    }
}
