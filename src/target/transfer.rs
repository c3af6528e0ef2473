//! Data that the target has asked hosts for: which buffer belongs to which Transfer Tag.
//!
//! A Transfer Tag is ours to choose, so it is looked up, never trusted: its low bits index a table, its high bits must
//! repeat the generation that the entry had when the R2T went out. A tag that was retired, or never issued, is unknown.
//!
//! ```text
//!  TTAG   15    11 10            0
//!        [ gener. |    index     ]      generations run 1..=30, so 0 and FFFFh are never issued
//! ```
//!
//! A write that is aborted while its data is under way leaves an *abandoned* entry: late data is read and thrown away, and
//! never touches the buffer, which is gone by then. Abandoned entries do not count against the queue; when too many pile
//! up, the oldest is forgotten and its late data becomes an error of the host.
//!
//! A [`TransferIndex`] names an entry that waits for data, and stays good until that transfer ends. An abandoned entry has
//! none: as an entry may be given away once it is abandoned, whoever receives its data only counts bytes.
#![forbid(unsafe_code)]

use std::collections::VecDeque;

use crate::memory::{self, DmaBuf};

const INDEX_BITS: u32 = 11;
const INDEX_MASK: u16 = (1 << INDEX_BITS) - 1;
const GENERATION_MAX: u8 = 30;
/// The most transfers that may wait for data at the same time.
pub const WAITING_MAX: usize = 1024;
/// The most abandoned transfers that are remembered.
const ABANDONED_MAX: usize = 1 << INDEX_BITS >> 1;

/// A transfer that is complete: the owner's token and the filled buffer.
#[derive(Debug)]
pub struct Arrived {
    pub token: u32,
    pub buf: DmaBuf,
    /// False when a data digest did not match.
    pub intact: bool,
}

struct Entry {
    generation: u8,
    state: State,
}

enum State {
    Free,
    Waiting(Waiting),
    Abandoned { cid: u16, received: usize, len: usize },
}

struct Waiting {
    token: u32,
    cid: u16,
    buf: DmaBuf,
    received: usize,
    intact: bool,
}

/// What is wrong with the header of an H2CData PDU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataHeaderError {
    /// No R2T with this tag is open, or it was for another command.
    UnknownTag,
    /// The data is not the next of what was asked for.
    OutOfRange,
    /// LAST_PDU is set although more was asked for.
    EarlyLast,
}

/// An entry that waits for data. Good until the transfer ends: all its data is here, or it is abandoned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransferIndex(u16);

#[derive(Default)]
pub struct Transfers {
    entries: Vec<Entry>,
    free: Vec<u16>,
    abandoned: VecDeque<u16>,
    waiting: usize,
    /// Memory of the buffers that wait, bytes.
    held: usize,
    owed: usize,
    /// Bytes that have come since the beginning.
    arrived: u64,
}

impl Transfers {
    /// How many transfers wait for data.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Memory of the buffers that wait for data, bytes.
    pub fn held(&self) -> usize {
        self.held
    }

    /// Bytes that were asked for and are not here yet.
    pub fn bytes_owed(&self) -> usize {
        self.owed
    }

    /// Bytes that have come since the connection began.
    pub fn bytes_arrived(&self) -> u64 {
        self.arrived
    }

    /// Opens a transfer that fills `buf` and returns the tag for its R2T. `None` when [`WAITING_MAX`] are open: the
    /// caller keeps the buffer and tries again when one has ended.
    pub fn open(&mut self, token: u32, cid: u16, buf: DmaBuf) -> Result<u16, DmaBuf> {
        if self.waiting == WAITING_MAX {
            return Err(buf);
        }
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.entries.len() <= usize::from(INDEX_MASK) => {
                self.entries.push(Entry { generation: 0, state: State::Free });
                (self.entries.len() - 1) as u16
            }
            // A full table that is not all waiting has an abandoned entry.
            None => match self.abandoned.pop_front() {
                Some(oldest) => {
                    self.entries[usize::from(oldest)].state = State::Free;
                    oldest
                }
                None => return Err(buf),
            },
        };
        let entry = &mut self.entries[usize::from(index)];
        entry.generation = entry.generation % GENERATION_MAX + 1;
        self.waiting += 1;
        self.held += memory::footprint(buf.len());
        self.owed += buf.len();
        entry.state = State::Waiting(Waiting { token, cid, buf, received: 0, intact: true });
        Ok(u16::from(entry.generation) << INDEX_BITS | index)
    }

    /// Takes a PDU of `len` bytes if its H2CData header is what was asked for. `None`: the transfer is abandoned, and the
    /// bytes go nowhere.
    pub fn accept(
        &mut self,
        ttag: u16,
        cid: u16,
        offset: u32,
        len: u32,
        last: bool,
    ) -> Result<Option<TransferIndex>, DataHeaderError> {
        let index = ttag & INDEX_MASK;
        let entry = self.entries.get(usize::from(index)).ok_or(DataHeaderError::UnknownTag)?;
        if u16::from(entry.generation) != ttag >> INDEX_BITS {
            return Err(DataHeaderError::UnknownTag);
        }
        let (owner, received, total) = match &entry.state {
            State::Free => return Err(DataHeaderError::UnknownTag),
            State::Waiting(waiting) => (waiting.cid, waiting.received, waiting.buf.len()),
            State::Abandoned { cid, received, len } => (*cid, *received, *len),
        };
        if owner != cid {
            return Err(DataHeaderError::UnknownTag);
        }
        // 64-bit sums: both fields are the host's.
        if u64::from(offset) != received as u64 || u64::from(offset) + u64::from(len) > total as u64 {
            return Err(DataHeaderError::OutOfRange);
        }
        if last && received + len as usize != total {
            return Err(DataHeaderError::EarlyLast);
        }
        match entry.state {
            State::Abandoned { .. } => {
                self.skip(index, len as usize);
                Ok(None)
            }
            _ => Ok(Some(TransferIndex(index))),
        }
    }

    fn waiting_at(&mut self, index: TransferIndex) -> Option<&mut Waiting> {
        match &mut self.entries.get_mut(usize::from(index.0))?.state {
            State::Waiting(waiting) => Some(waiting),
            State::Free | State::Abandoned { .. } => None,
        }
    }

    /// Where the next `len` bytes of a transfer go.
    pub fn room(&mut self, index: TransferIndex, len: usize) -> Option<&mut [u8]> {
        let waiting = self.waiting_at(index)?;
        waiting.buf.get_mut(waiting.received..)?.get_mut(..len)
    }

    /// Takes note of `len` more bytes.
    pub fn received(&mut self, index: TransferIndex, len: usize) {
        if let Some(waiting) = self.waiting_at(index) {
            waiting.received += len;
            self.owed -= len;
            self.arrived += len as u64;
        }
    }

    /// Checks the last `len` bytes received against their digest.
    pub fn check_digest(&mut self, index: TransferIndex, len: usize, digest: u32) {
        if let Some(waiting) = self.waiting_at(index)
            && let Some(start) = waiting.received.checked_sub(len)
            && crate::crc32c::crc32c(&waiting.buf[start..waiting.received]) != digest
        {
            waiting.intact = false;
        }
    }

    /// Ends the transfer if all its data is here.
    pub fn finish(&mut self, index: TransferIndex) -> Option<Arrived> {
        if self.waiting_at(index).is_none_or(|waiting| waiting.received < waiting.buf.len()) {
            return None;
        }
        let entry = &mut self.entries[usize::from(index.0)];
        let State::Waiting(waiting) = std::mem::replace(&mut entry.state, State::Free) else { return None };
        self.waiting -= 1;
        self.held -= memory::footprint(waiting.buf.len());
        self.free.push(index.0);
        Some(Arrived { token: waiting.token, buf: waiting.buf, intact: waiting.intact })
    }

    /// `len` bytes of an abandoned transfer are, or will be, thrown away. With the last of them the entry is free.
    fn skip(&mut self, index: u16, len: usize) {
        let entry = &mut self.entries[usize::from(index)];
        let State::Abandoned { received, len: total, .. } = &mut entry.state else { return };
        *received += len;
        if received == total {
            entry.state = State::Free;
            self.abandoned.retain(|&other| other != index);
            self.free.push(index);
        }
    }

    /// Gives up the transfer of `token`: its buffer is dropped, its late data will be thrown away. `arriving` says how many
    /// bytes are still to come of a PDU that is being received into it. False if there is no such transfer.
    pub fn abandon(&mut self, token: u32, arriving: impl FnOnce(TransferIndex) -> usize) -> bool {
        let found = self
            .entries
            .iter()
            .position(|entry| matches!(&entry.state, State::Waiting(waiting) if waiting.token == token));
        let Some(at) = found else { return false };
        let index = at as u16;
        if self.abandoned.len() == ABANDONED_MAX
            && let Some(oldest) = self.abandoned.pop_front()
        {
            self.entries[usize::from(oldest)].state = State::Free;
            self.free.push(oldest);
        }
        let entry = &mut self.entries[at];
        if let State::Waiting(waiting) = &entry.state {
            let (cid, received, len) = (waiting.cid, waiting.received, waiting.buf.len());
            self.waiting -= 1;
            self.held -= memory::footprint(len);
            self.owed -= len - received;
            entry.state = State::Abandoned { cid, received, len };
            self.abandoned.push_back(index);
            self.skip(index, arriving(TransferIndex(index)));
        }
        true
    }

    /// Drops every buffer; the connection is over.
    pub fn clear(&mut self) {
        *self = Transfers::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(transfers: &mut Transfers, token: u32, len: usize) -> u16 {
        transfers.open(token, token as u16, DmaBuf::zeroed(len)).expect("room for another transfer")
    }

    #[test]
    fn only_the_tag_and_the_next_bytes_that_were_asked_for_are_accepted() {
        let mut transfers = Transfers::default();
        let ttag = open(&mut transfers, 7, 8192);
        for wrong in [0, 0xFFFF, ttag ^ 1, ttag ^ 0x800, ttag.wrapping_add(1)] {
            assert_eq!(
                transfers.accept(wrong, 7, 0, 4096, false),
                Err(DataHeaderError::UnknownTag),
                "{wrong:#x}"
            );
        }
        assert_eq!(transfers.accept(ttag, 8, 0, 4096, false), Err(DataHeaderError::UnknownTag));
        assert_eq!(transfers.accept(ttag, 7, 4096, 4096, true), Err(DataHeaderError::OutOfRange));
        assert_eq!(transfers.accept(ttag, 7, 0, 8193, true), Err(DataHeaderError::OutOfRange));
        assert_eq!(transfers.accept(ttag, 7, u32::MAX, u32::MAX, true), Err(DataHeaderError::OutOfRange));
        assert_eq!(transfers.accept(ttag, 7, 0, 4096, true), Err(DataHeaderError::EarlyLast));
        let index = transfers.accept(ttag, 7, 0, 8192, true).unwrap().expect("it waits");
        transfers.room(index, 8192).unwrap().fill(5);
        transfers.received(index, 8192);
        let arrived = transfers.finish(index).unwrap();
        assert!(arrived.intact && arrived.token == 7 && arrived.buf.iter().all(|&b| b == 5));
        assert_eq!(
            transfers.accept(ttag, 7, 0, 8192, true),
            Err(DataHeaderError::UnknownTag),
            "the tag is retired"
        );
        assert_eq!(transfers.waiting(), 0);
    }

    #[test]
    fn a_tag_is_not_reused_soon_and_never_zero_or_all_ones() {
        let mut transfers = Transfers::default();
        let mut last = 0;
        for round in 0..200 {
            let ttag = open(&mut transfers, round, 4);
            assert!(ttag != 0 && ttag != 0xFFFF && ttag != last);
            last = ttag;
            let index = transfers.accept(ttag, round as u16, 0, 4, true).unwrap().expect("it waits");
            transfers.received(index, 4);
            assert!(transfers.finish(index).is_some());
        }
    }

    #[test]
    fn late_data_of_an_abandoned_transfer_goes_nowhere_and_frees_the_entry() {
        let mut transfers = Transfers::default();
        let ttag = open(&mut transfers, 1, 8);
        let mut abandon = |token| transfers.abandon(token, |_| 0);
        assert!(abandon(1) && !abandon(1) && !abandon(2));
        assert_eq!((transfers.waiting(), transfers.held()), (0, 0));
        assert_eq!(transfers.accept(ttag, 1, 0, 4, false), Ok(None));
        assert_eq!(transfers.accept(ttag, 1, 4, 4, true), Ok(None));
        assert_eq!(transfers.accept(ttag, 1, 0, 8, true), Err(DataHeaderError::UnknownTag));
    }

    #[test]
    fn abandoning_for_ever_neither_fills_the_table_nor_grows_it() {
        let mut transfers = Transfers::default();
        for round in 0..10_000 {
            open(&mut transfers, round, 4);
            assert!(transfers.abandon(round, |_| 0));
        }
        let tokens: Vec<_> = (0..WAITING_MAX as u32).map(|t| open(&mut transfers, t, 4)).collect();
        assert!(transfers.open(9999, 9, DmaBuf::zeroed(4)).is_err(), "bounded");
        assert!(transfers.entries.len() <= 1 << INDEX_BITS);
        let distinct: std::collections::BTreeSet<_> = tokens.iter().collect();
        assert_eq!(distinct.len(), WAITING_MAX);
    }
}
