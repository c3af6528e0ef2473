//! Taking commands back (Base 2.0, 5.1).
//!
//! | the command | becomes of it |
//! | --- | --- |
//! | waits for memory, for data, or for its other half | it ends at once with Command Abort Requested; late data is thrown away |
//! | runs and changes nothing, or has not begun to | the same; the job ends unheard, and its memory lives until then |
//! | runs, and the backend may have been given data | the abort says "not aborted"; the job stops where it can |
//!
//! So a host that was told of an aborted command knows that nothing of it will be written from then on. What the backend has
//! been given it may write at any time until it answers: that command ends when it does, with what became of it, or with
//! Command Abort Requested when a part was left undone.
#![forbid(unsafe_code)]

use super::buffers::Need;
use super::fused::{First, Pair};
use super::{IoQueue, Slot};
use crate::nvme::status::Status;
use crate::target::connection::Connection;

impl IoQueue {
    /// Aborts a command. False if something of it may still be written, or it is not there.
    pub fn abort(&mut self, conn: &mut Connection, cid: u16) -> bool {
        if matches!(&self.first, First::Held(first) if first.cid == cid) {
            self.first = First::Failed;
            self.end(conn, cid, Status::ABORT_REQUESTED);
            return true;
        }
        let found = self.slots.iter().position(|slot| slot.is_of(cid));
        let Some(slot) = found else { return false };
        let Slot::Running { cid: first, second, held, is_change } = self.slots[slot] else {
            self.give_up(conn, slot as u32, Status::ABORT_REQUESTED, Some(cid));
            return true;
        };
        if !self.stops[slot].stop() && is_change {
            return false;
        }
        self.slots[slot] = Slot::Lingering { held };
        self.lingering += 1;
        self.end_both(conn, first, second, Status::ABORT_REQUESTED, Some(cid));
        true
    }

    /// Ends a command that waits. Of a pair, the half `only` has the status if it is given; the other has failed with it.
    pub(super) fn give_up(&mut self, conn: &mut Connection, slot: u32, status: Status, only: Option<u16>) {
        match self.take_slot(slot) {
            Slot::Waiting { need: Need::Pair(pair), .. } => {
                self.waiting.retain(|&other| other != slot);
                self.end_pair(conn, &pair, status, only);
            }
            Slot::Waiting { cid, .. } => {
                self.waiting.retain(|&other| other != slot);
                self.end(conn, cid, status);
            }
            Slot::Data { cid, .. } => {
                conn.abandon_data(slot);
                self.end(conn, cid, status);
            }
            Slot::PairData { pair, .. } => {
                self.abandon_pair(conn, slot, &pair);
                self.end_pair(conn, &pair, status, only);
            }
            Slot::Free | Slot::PairHalf { .. } | Slot::Running { .. } | Slot::Lingering { .. } => {}
        }
    }

    pub(super) fn end_pair(&mut self, conn: &mut Connection, pair: &Pair, status: Status, only: Option<u16>) {
        self.end_both(conn, pair.compare.cid, Some(pair.write.cid), status, only);
    }

    /// Ends a command, and its other half if it has one.
    fn end_both(
        &mut self,
        conn: &mut Connection,
        first: u16,
        second: Option<u16>,
        status: Status,
        only: Option<u16>,
    ) {
        for cid in [Some(first), second].into_iter().flatten() {
            let is_meant = only.is_none_or(|only| only == cid);
            self.end(conn, cid, if is_meant { status } else { Status::ABORTED_FAILED_FUSED });
        }
    }
}

impl Slot {
    /// Whether this is the place of an unanswered command.
    fn is_of(&self, cid: u16) -> bool {
        match self {
            Slot::Waiting { need: Need::Pair(pair), .. } | Slot::PairData { pair, .. } => pair.has(cid),
            Slot::Waiting { cid: own, .. } | Slot::Data { cid: own, .. } => *own == cid,
            Slot::Running { cid: own, second, .. } => *own == cid || *second == Some(cid),
            Slot::Free | Slot::PairHalf { .. } | Slot::Lingering { .. } => false,
        }
    }
}
