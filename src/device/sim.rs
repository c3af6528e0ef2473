//! Simulated disks that fail as real ones do when the power goes: what was not flushed is kept, lost, torn or
//! reordered; and on demand they fail to read or write, or rot.
//!
//! A write is *in flight*, then *done* (it is read back), then *flushed* (it stays). A flush covers what was done when
//! it was asked for. A power cut ([`SimDisks::cut_after`]) lets no operation complete from then on, and
//! [`SimDisks::power_cycle`] throws the dice over everything that was not flushed, in flight or done.
//!
//! ```text
//! write ──▶ in flight ──▶ done ──▶ flushed          cut: in flight, done ──▶ kept, lost, or torn by sectors
//! ```
//!
//! All chance comes from one seed and time is the executor's, so a run under [`crate::reactor::SimReactors`] can be
//! made again from its seed.

#![forbid(unsafe_code)]

mod store;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use self::store::{BLOCK, Contents, Store};
use super::{Backing, Device, DeviceInfo, DeviceKind, IoError};
use crate::memory::{DmaBuf, DmaSlice};

/// What a power cut cannot tear.
const SECTOR: usize = 512;

/// How often a disk that hangs looks whether it still does.
const HOLD_STEP: Duration = Duration::from_millis(1);

/// What a simulated disk shall be.
#[derive(Debug, Clone)]
pub struct SimSpec {
    /// Bytes, a multiple of 4096.
    pub size: u64,
    /// Whether acknowledged writes may be lost until flushed.
    pub write_cache: bool,
    /// Whether operations take time. Without, they are done at their first poll.
    pub latency: bool,
    /// Whether reads take much longer than writes.
    pub slow_reads: bool,
}

/// How often operations fail, per million.
#[derive(Debug, Clone, Copy, Default)]
pub struct SimFaults {
    /// Reads.
    pub reads: u32,
    /// Writes; part of what should have been written may be.
    pub writes: u32,
    /// Flushes; what they should have covered may be lost later.
    pub flushes: u32,
}

/// Some disks with one power supply.
#[derive(Clone)]
pub struct SimDisks {
    shared: Arc<Mutex<Shared>>,
}

struct Shared {
    disks: Vec<Disk>,
    random: u64,
    operations: u64,
    cut_after: Option<u64>,
    cut: bool,
    faults: SimFaults,
    /// What lies from this byte on of each disk, and is all zeroes, has no room below it.
    full_from: Option<u64>,
    held: bool,
    digest: u64,
}

struct Disk {
    spec: SimSpec,
    /// What is read back.
    visible: Store,
    /// What a power cut leaves in any case; `None` without a write cache: all that is read back.
    durable: Option<Store>,
    contents: Contents,
    /// What is in flight, or done and not flushed, in the order of submission.
    pending: Vec<Pending>,
    next: u64,
}

#[derive(Clone)]
struct Pending {
    id: u64,
    change: Change,
    done: bool,
}

#[derive(Clone)]
enum Change {
    Write { offset: u64, data: DmaSlice },
    Zero { offset: u64, len: u64 },
}

/// One disk, as a device's backing.
pub(super) struct Sim {
    shared: Arc<Mutex<Shared>>,
    index: usize,
}

/// What became of an operation when it began.
enum Begun {
    /// It completes after this time, or fails then.
    After(Duration, Result<(), IoError>),
    /// The power is gone: it never completes.
    Never,
}

impl SimDisks {
    /// Blank disks.
    pub fn new(seed: u64, specs: Vec<SimSpec>) -> SimDisks {
        let disks = specs.into_iter().map(|spec| Disk {
            durable: spec.write_cache.then(Store::default),
            spec,
            visible: Store::default(),
            contents: Contents::default(),
            pending: Vec::new(),
            next: 0,
        });
        let shared = Shared {
            disks: disks.collect(),
            random: seed ^ 0x5DEE_CE66_D5DE_ECE6,
            operations: 0,
            cut_after: None,
            cut: false,
            faults: SimFaults::default(),
            full_from: None,
            held: false,
            digest: 0,
        };
        SimDisks { shared: Arc::new(Mutex::new(shared)) }
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        lock(&self.shared)
    }

    /// The disks, opened. Every call opens them anew.
    pub fn open(&self) -> Vec<Device> {
        let specs: Vec<SimSpec> = self.lock().disks.iter().map(|disk| disk.spec.clone()).collect();
        let device = |(index, spec): (usize, SimSpec)| {
            let info = DeviceInfo {
                uri: format!("sim:{index}"),
                name: format!("sim{index}"),
                kind: DeviceKind::Sim,
                block_size: BLOCK as u32,
                size: spec.size,
                write_cache: spec.write_cache,
                atomic_bytes: SECTOR as u32,
                uuid: crate::reactor::new_uuid(),
            };
            let backing = Backing::Sim(Sim { shared: Arc::clone(&self.shared), index });
            Device::around(info, false, backing)
        };
        specs.into_iter().enumerate().map(device).collect()
    }

    /// Cuts the power when so many more operations have begun; the last of them is in flight then. `None`: never.
    pub fn cut_after(&self, operations: Option<u64>) {
        let mut shared = self.lock();
        shared.cut_after = operations.map(|count| shared.operations + count);
    }

    /// Whether the power is gone.
    pub fn is_cut(&self) -> bool {
        self.lock().cut
    }

    /// Operations begun so far.
    pub fn operations(&self) -> u64 {
        self.lock().operations
    }

    /// A number that two runs share only if the same bytes went the same ways in the same order.
    pub fn digest(&self) -> u64 {
        self.lock().digest
    }

    /// How often operations fail from now on.
    pub fn set_faults(&self, faults: SimFaults) {
        self.lock().faults = faults;
    }

    /// As a sparse file in a file system without room: from byte `from` on, only what is not all zeroes can be written.
    pub fn set_full(&self, from: Option<u64>) {
        self.lock().full_from = from;
    }

    /// As disks that hang: while `held`, what has begun does not end.
    pub fn hold(&self, held: bool) {
        self.lock().held = held;
    }

    /// The power comes back: for each change that was not flushed it is decided whether the disk has it.
    pub fn power_cycle(&self) {
        let mut shared = self.lock();
        shared.restart(|random| match below(random, 6) {
            0 | 1 => Fate::Kept,
            2 | 3 => Fate::Lost,
            4 => Fate::Torn(BLOCK),
            _ => Fate::Torn(SECTOR),
        });
    }

    /// The power stays, but nobody waits for what is in flight any more: all of it is done.
    pub fn settle(&self) {
        self.lock().restart(|_| Fate::Kept);
    }

    /// Flips one bit, of what is on the disk and of what it reads back.
    pub fn flip(&self, disk: usize, byte: u64, bit: u32) {
        let disk = &mut self.lock().disks[disk];
        for store in [Some(&mut disk.visible), disk.durable.as_mut()].into_iter().flatten() {
            let block = byte / BLOCK as u64;
            let mut content = store.get(block).map_or([0; BLOCK], |content| **content);
            content[byte as usize % BLOCK] ^= 1 << (bit % 8);
            store.write(block, &content, &mut disk.contents);
        }
    }

    /// Numbers of the 4 KiB blocks of a disk that are not all zeroes.
    pub fn blocks(&self, disk: usize) -> Vec<u64> {
        self.lock().disks[disk].visible.blocks().collect()
    }

    /// What a disk reads back in one of its blocks.
    pub fn block(&self, disk: usize, block: u64) -> Vec<u8> {
        self.lock().disks[disk].visible.get(block).map_or(vec![0; BLOCK], |content| content.to_vec())
    }
}

/// What becomes of a change in a power cut.
enum Fate {
    Kept,
    Lost,
    /// Kept or lost in pieces of so many bytes.
    Torn(usize),
}

impl Shared {
    fn restart(&mut self, fate: impl Fn(&mut u64) -> Fate) {
        (self.cut, self.cut_after) = (false, None);
        let random = &mut self.random;
        for Disk { visible, durable, contents, pending, .. } in &mut self.disks {
            let kept = durable.as_mut().unwrap_or(visible);
            for pending in std::mem::take(pending) {
                match fate(random) {
                    Fate::Kept => pending.change.apply(kept, contents),
                    Fate::Lost => {}
                    Fate::Torn(unit) => pending.change.tear(kept, contents, unit, random),
                }
            }
            if let Some(durable) = durable {
                visible.clone_from(durable);
            }
        }
    }

    fn note(&mut self, word: u64) {
        self.digest = (self.digest.rotate_left(5) ^ word).wrapping_mul(0x517C_C1B7_2722_0A95);
    }

    fn begin(&mut self, index: usize, read: bool) -> Begun {
        let faults = self.faults;
        self.begin_with(index, if read { faults.reads } else { faults.writes }, read)
    }

    fn begin_with(&mut self, index: usize, failures: u32, read: bool) -> Begun {
        if self.cut {
            return Begun::Never;
        }
        self.operations += 1;
        if self.cut_after.is_some_and(|at| self.operations >= at) {
            self.cut = true;
            return Begun::Never;
        }
        let failed = failures > 0 && below(&mut self.random, 1_000_000) < u64::from(failures);
        let result = if failed { Err(IoError::Os(libc::EIO)) } else { Ok(()) };
        if !self.disks[index].spec.latency {
            return Begun::After(Duration::ZERO, result);
        }
        let micros = match below(&mut self.random, 600) {
            // Real disks stop for seconds now and then.
            0 => 500_000 + below(&mut self.random, 4_000_000),
            1..=30 => 1_000 + below(&mut self.random, 20_000),
            31..=180 => 100 + below(&mut self.random, 900),
            _ => 10 + below(&mut self.random, 90),
        };
        let slow = read && self.disks[index].spec.slow_reads;
        let micros = if slow { micros + below(&mut self.random, 100_000) } else { micros };
        Begun::After(Duration::from_micros(micros), result)
    }
}

impl Change {
    fn needs_room(&self, from: u64, store: &Store) -> bool {
        match self {
            Change::Write { offset, data } => {
                let (first, count) = (offset / BLOCK as u64, (data.len() / BLOCK) as u64);
                *offset >= from && (first..first + count).any(|block| store.get(block).is_none())
            }
            Change::Zero { .. } => false,
        }
    }

    fn apply(&self, store: &mut Store, contents: &mut Contents) {
        match self {
            Change::Write { offset, data } => store.write(offset / BLOCK as u64, data, contents),
            Change::Zero { offset, len } => store.cut(offset / BLOCK as u64, (offset + len) / BLOCK as u64),
        }
    }

    fn tear(&self, store: &mut Store, contents: &mut Contents, unit: usize, random: &mut u64) {
        let (offset, len) = match self {
            Change::Write { offset, data } => (*offset, data.len() as u64),
            Change::Zero { offset, len } => (*offset, *len),
        };
        for at in 0..len / BLOCK as u64 {
            let block = offset / BLOCK as u64 + at;
            let mut content = store.get(block).map_or([0; BLOCK], |content| **content);
            for from in (0..BLOCK).step_by(unit) {
                if below(random, 2) == 0 {
                    continue;
                }
                let piece = &mut content[from..from + unit];
                match self {
                    Change::Write { data, .. } => {
                        piece.copy_from_slice(&data[at as usize * BLOCK + from..][..unit]);
                    }
                    Change::Zero { .. } => piece.fill(0),
                }
            }
            store.write(block, &content, contents);
        }
    }
}

impl Disk {
    /// A change is done.
    fn complete(&mut self, id: u64) {
        let Ok(at) = self.pending.binary_search_by_key(&id, |pending| pending.id) else { return };
        self.pending[at].done = true;
        self.pending[at].change.apply(&mut self.visible, &mut self.contents);
        if self.durable.is_none() {
            self.pending.remove(at);
        }
    }
}

impl Sim {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        lock(&self.shared)
    }

    pub(super) async fn read(&self, offset: u64, mut buf: DmaBuf) -> (Result<(), IoError>, DmaBuf) {
        let begun = {
            let mut shared = self.lock();
            shared.note(offset << 1);
            shared.begin(self.index, true)
        };
        let result = self.wait(begun).await;
        let shared = self.lock();
        let disk = &shared.disks[self.index];
        for (at, bytes) in buf.chunks_exact_mut(BLOCK).enumerate() {
            match disk.visible.get(offset / BLOCK as u64 + at as u64) {
                Some(content) => bytes.copy_from_slice(&content[..]),
                None => bytes.fill(0),
            }
        }
        drop(shared);
        (result, buf)
    }

    pub(super) async fn write(&self, offset: u64, data: DmaSlice) -> Result<(), IoError> {
        let crc = crate::crc32c::crc32c(&data);
        self.change(Change::Write { offset, data }, offset ^ u64::from(crc) << 32).await
    }

    pub(super) async fn zero(&self, offset: u64, len: u64) -> Result<(), IoError> {
        self.change(Change::Zero { offset, len }, offset ^ len << 32).await
    }

    async fn change(&self, change: Change, note: u64) -> Result<(), IoError> {
        let (begun, id) = {
            let mut shared = self.lock();
            shared.note(note << 1 | 1);
            let was_cut = shared.cut;
            if shared.full_from.is_some_and(|from| change.needs_room(from, &shared.disks[self.index].visible))
            {
                return Err(IoError::CapacityExceeded);
            }
            let begun = shared.begin(self.index, false);
            let disk = &mut shared.disks[self.index];
            disk.next += 1;
            let id = disk.next;
            // What is asked for after the cut never reaches the disk.
            if !was_cut {
                disk.pending.push(Pending { id, change, done: false });
            }
            (begun, id)
        };
        let result = self.wait(begun).await;
        let mut shared = self.lock();
        if !shared.cut {
            // A write that failed may have been done all the same.
            let Shared { disks, random, .. } = &mut *shared;
            let disk = &mut disks[self.index];
            if result.is_ok() || below(random, 2) == 0 {
                disk.complete(id);
            } else {
                disk.pending.retain(|pending| pending.id != id);
            }
        }
        result
    }

    pub(super) async fn flush(&self) -> Result<(), IoError> {
        let (begun, covers) = {
            let mut shared = self.lock();
            let failures = shared.faults.flushes;
            shared.note(u64::MAX);
            let begun = shared.begin_with(self.index, failures, false);
            let done = shared.disks[self.index].pending.iter().filter(|pending| pending.done);
            (begun, done.map(|pending| pending.id).collect::<Vec<u64>>())
        };
        let result = self.wait(begun).await;
        let mut shared = self.lock();
        if !shared.cut && result.is_ok() {
            let Disk { pending, durable, contents, .. } = &mut shared.disks[self.index];
            pending.retain(|pending| {
                // They are in the order of their submission.
                let covered = covers.binary_search(&pending.id).is_ok();
                if let (true, Some(durable)) = (covered, durable.as_mut()) {
                    pending.change.apply(durable, contents);
                }
                !covered
            });
        }
        result
    }

    async fn wait(&self, begun: Begun) -> Result<(), IoError> {
        let Begun::After(time, result) = begun else { return std::future::pending().await };
        if time > Duration::ZERO {
            crate::reactor::sleep(time).await;
        }
        while self.lock().held {
            crate::reactor::sleep(HOLD_STEP).await;
        }
        if self.lock().cut {
            std::future::pending::<()>().await;
        }
        result
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number below `limit`, by SplitMix64.
fn below(state: &mut u64, limit: u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (mixed ^ (mixed >> 31)) % limit
}
