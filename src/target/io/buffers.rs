//! Where the data of I/O commands goes: buffers, waiting for them, and what is done once data is here.
//!
//! Commands that find no buffer wait in order of arrival. There is no state in which a command holds one buffer and waits
//! for another, so waiting ends whenever anything ends.
#![forbid(unsafe_code)]

use zerocopy::FromBytes;

use super::{Inline, IoQueue, Slot};
use crate::memory::{DmaBuf, DmaSlice};
use crate::nvme::base::{SglKind, Sqe};
use crate::nvme::command::DsmRange;
use crate::nvme::status::Status;
use crate::target::connection::Connection;
use crate::target::job::{NamespaceRef, Work};
use crate::target::transfer::Arrived;

/// What a waiting command needs a buffer for.
pub(super) enum Need {
    Read { offset: u64, len: u32 },
    HostData { len: u32, then: AfterData },
}

pub(super) enum AfterData {
    Write { offset: u64, fua: bool },
    Deallocate { ranges: u16 },
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
        let len = sqe.dptr.length.get();
        if !lengths.contains(&len) {
            return Err(Status::DATA_SGL_LENGTH_INVALID.with_dnr());
        }
        match sqe.data_kind()? {
            SglKind::Transport => {
                self.start_with_buffer(conn, cid, namespace, Need::HostData { len, then });
                Ok(())
            }
            SglKind::InCapsule if sqe.dptr.address.get() != 0 => Err(Status::SGL_OFFSET_INVALID.with_dnr()),
            SglKind::InCapsule if inline.range.len() != len as usize => {
                Err(Status::DATA_SGL_LENGTH_INVALID.with_dnr())
            }
            SglKind::InCapsule => {
                let data = match then {
                    // Done with by the time the receive buffer is used again.
                    AfterData::Write { .. } if namespace.backend.takes_any_memory() => {
                        inline.chunk.slice(inline.range)
                    }
                    _ => self.copy_inline(&inline.chunk[inline.range]),
                };
                self.run_with_data(cid, namespace, then, data)
            }
            SglKind::Other(_) => Err(Status::SGL_TYPE_INVALID.with_dnr()),
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
            Need::HostData { len, .. } => (*len as usize, held.write),
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
        buf: DmaBuf,
    ) {
        match need {
            Need::Read { offset, .. } => {
                self.free_slot(slot);
                self.run(cid, namespace, Work::Read { offset, buf });
            }
            Need::HostData { len, then } => {
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
                    // Every transfer tag is in use: wait for one like for memory.
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
        let Slot::Data { cid, namespace, then } = self.take_slot(arrived.token) else { return };
        let outcome = match arrived.intact {
            true => self.run_with_data(cid, namespace, then, arrived.buf.freeze()),
            false => Err(Status::TRANSIENT_TRANSPORT_ERROR),
        };
        if let Err(status) = outcome {
            self.end(conn, cid, status);
        }
    }

    pub(super) fn run_with_data(
        &mut self,
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
        };
        self.run(cid, namespace, work);
        Ok(())
    }
}
