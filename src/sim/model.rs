//! What must be true of a pool: a plain history for every block.
//!
//! Each write gets a number when it is submitted and another when it is acknowledged, from one clock. From these follows
//! what may be read, found in a snapshot, or left after a crash:
//!
//! * a read sees the last write acknowledged before it was submitted, or a later one submitted before it returned;
//! * a snapshot holds every write acknowledged before it was asked for, none submitted after it was answered, and with a
//!   write also everything acknowledged before that write was submitted;
//! * after a crash a volume's block holds the last write known to be durable, or a later one;
//! * a snapshot never changes.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};

use super::family::Family;
use super::layout::{Layout, Version};

/// Moments of a run.
pub(super) type Moment = u64;

const NEVER: Moment = Moment::MAX;

/// One write to one block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    submitted: Moment,
    acknowledged: Moment,
    version: Version,
}

/// What one block has been through. There is always one entry.
#[derive(Debug, Clone)]
pub(super) struct History {
    entries: Vec<Entry>,
    /// The last entry that survives any crash.
    durable: usize,
}

impl History {
    fn new(version: Version) -> History {
        History { entries: vec![Entry { submitted: 0, acknowledged: 0, version }], durable: 0 }
    }

    /// The last entry acknowledged before `moment`.
    fn certain(&self, moment: Moment) -> usize {
        self.entries.iter().rposition(|entry| entry.acknowledged < moment).unwrap_or(0)
    }

    /// The oldest entry through which the block may hold `version` at some moment of `from..to`.
    fn find(&self, version: Version, from: Moment, to: Moment) -> Option<&Entry> {
        let candidates = &self.entries[self.certain(from)..];
        candidates.iter().find(|entry| entry.version == version && entry.submitted < to)
    }

    /// What the block holds when it cannot be read.
    fn lost(&self, damaged: &BTreeSet<(Version, u64)>, offset: u64) -> Version {
        let versions = self.entries.iter().rev().map(|entry| entry.version);
        versions.into_iter().find(|version| damaged.contains(&(*version, offset))).unwrap_or(self.last())
    }

    fn last(&self) -> Version {
        self.entries[self.entries.len() - 1].version
    }
}

/// A volume.
#[derive(Debug, Clone)]
pub(super) struct Volume {
    pub size: u64,
    pub write_cache: bool,
    spots: Vec<History>,
    /// Spots that a write is under way to.
    pub busy: BTreeSet<usize>,
}

/// A snapshot.
#[derive(Debug, Clone)]
pub(super) struct Snapshot {
    pub size: u64,
    content: Content,
}

#[derive(Debug, Clone)]
enum Content {
    /// Read once; it must stay so.
    Known(Vec<Version>),
    /// Taken, and not looked at yet.
    Taken { asked: Moment, answered: Moment, histories: Vec<History> },
}

/// The whole pool.
#[derive(Debug, Clone)]
pub(super) struct Model {
    pub layout: Layout,
    now: Moment,
    next_version: Version,
    pub volumes: BTreeMap<String, Volume>,
    pub snapshots: BTreeMap<String, Snapshot>,
    /// Parents and pins.
    pub family: Family,
    /// Blocks whose only copy was damaged: reading them may fail.
    pub damaged: BTreeSet<(Version, u64)>,
    /// Reads and snapshots under way: no history may be shortened.
    pub watchers: usize,
}

impl Model {
    pub fn new(layout: Layout) -> Model {
        Model {
            layout,
            now: 1,
            next_version: 1,
            volumes: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            family: Family::default(),
            damaged: BTreeSet::new(),
            watchers: 0,
        }
    }

    pub fn tick(&mut self) -> Moment {
        self.now += 1;
        self.now
    }

    pub fn next_version(&mut self) -> Version {
        self.next_version += 1;
        self.next_version
    }

    pub fn create(&mut self, name: &str, size: u64, write_cache: bool) {
        let spots = vec![History::new(0); self.layout.spots_within(size)];
        let volume = Volume { size, write_cache, spots, busy: BTreeSet::new() };
        self.volumes.insert(name.to_owned(), volume);
        self.family.grew(name, None);
    }

    /// A write, or with version 0 a trim, of `count` spots is submitted.
    pub fn submit(&mut self, volume: &str, spot: usize, count: usize, version: Version) -> Moment {
        let moment = self.tick();
        if let Some(volume) = self.volumes.get_mut(volume) {
            for at in spot..spot + count {
                let entry = Entry { submitted: moment, acknowledged: NEVER, version };
                volume.spots[at].entries.push(entry);
                volume.busy.insert(at);
            }
        }
        moment
    }

    /// The write submitted at `submitted` was acknowledged, or failed and may have been done or not.
    pub fn complete(
        &mut self,
        volume: &str,
        (spot, count): (usize, usize),
        submitted: Moment,
        done: bool,
        durable: bool,
    ) {
        let (moment, settled) = (self.tick(), self.watchers == 0);
        let Some(volume) = self.volumes.get_mut(volume) else { return };
        for at in spot..spot + count {
            volume.busy.remove(&at);
            let history = &mut volume.spots[at];
            let Some(entry) = history.entries.iter().position(|entry| entry.submitted == submitted) else {
                continue;
            };
            if done {
                history.entries[entry].acknowledged = moment;
                if durable {
                    history.durable = history.durable.max(entry);
                }
            }
            if settled {
                history.entries.drain(..history.durable);
                history.durable = 0;
            }
        }
    }

    /// A flush asked for at `asked` was answered.
    pub fn flushed(&mut self, volume: &str, asked: Moment) {
        let settled = self.watchers == 0;
        let Some(volume) = self.volumes.get_mut(volume) else { return };
        for history in &mut volume.spots {
            history.durable = history.durable.max(history.certain(asked));
            if settled {
                history.entries.drain(..history.durable);
                history.durable = 0;
            }
        }
    }

    /// Whether a read of one block, from `asked` until now, may have seen `version`.
    pub fn may_read(&self, volume: &str, spot: usize, version: Version, asked: Moment) -> bool {
        self.volumes
            .get(volume)
            .is_some_and(|volume| volume.spots[spot].find(version, asked, NEVER).is_some())
    }

    /// Versions that a read of one block may see.
    pub fn readable(&self, volume: &str, spot: usize, asked: Moment) -> Vec<Version> {
        let Some(volume) = self.volumes.get(volume) else { return Vec::new() };
        let history = &volume.spots[spot];
        history.entries[history.certain(asked)..].iter().map(|entry| entry.version).collect()
    }

    /// A snapshot was taken of a volume as it was at some moment between `asked` and now.
    pub fn take(&mut self, name: &str, snapshot: &str, asked: Moment) {
        let answered = self.tick();
        let Some(volume) = self.volumes.get_mut(name) else { return };
        let content = Content::Taken { asked, answered, histories: volume.spots.clone() };
        self.snapshots.insert(snapshot.to_owned(), Snapshot { size: volume.size, content });
        self.family.taken(name, snapshot);
        // What was acknowledged before is durable with it.
        for history in &mut volume.spots {
            history.durable = history.durable.max(history.certain(asked));
        }
    }

    /// Versions that a block of a snapshot may hold.
    pub fn possible(&self, snapshot: &str, spot: usize) -> Vec<Version> {
        match self.snapshots.get(snapshot).map(|snapshot| &snapshot.content) {
            Some(Content::Known(versions)) => vec![versions[spot]],
            Some(Content::Taken { histories, .. }) => {
                histories[spot].entries.iter().map(|entry| entry.version).collect()
            }
            None => Vec::new(),
        }
    }

    /// What a snapshot holds, once it was looked at.
    pub fn known(&self, snapshot: &str) -> Option<&[Version]> {
        match &self.snapshots.get(snapshot)?.content {
            Content::Known(versions) => Some(versions),
            Content::Taken { .. } => None,
        }
    }

    /// Snapshots that nobody looked at yet.
    pub fn unknown(&self) -> Vec<String> {
        let unknown = self.snapshots.iter().filter(|(_, s)| matches!(s.content, Content::Taken { .. }));
        unknown.map(|(name, _)| name.clone()).collect()
    }

    /// Judges what was read from snapshots that were taken as one; from now on they must stay so. `None` for a block
    /// that may not be readable.
    pub fn judge_group(&mut self, found: &[(String, Vec<Option<Version>>)]) -> Result<(), String> {
        let mut newest = 0;
        for (name, versions) in found {
            let Some(Snapshot { content: Content::Taken { asked, answered, histories }, .. }) =
                self.snapshots.get(name)
            else {
                continue;
            };
            for (spot, version) in versions.iter().enumerate() {
                let Some(version) = version else { continue };
                let history = &histories[spot];
                let entry = history.find(*version, *asked, *answered).ok_or_else(|| {
                    format!("snapshot {name}, spot {spot}: holds write {version}; {history:?}, asked {asked}")
                })?;
                newest = newest.max(entry.submitted);
            }
        }
        for (name, versions) in found {
            let Some(snapshot) = self.snapshots.get_mut(name) else { continue };
            let Content::Taken { asked, answered, histories } = &snapshot.content else { continue };
            for (spot, version) in versions.iter().enumerate() {
                let Some(version) = version else { continue };
                let (history, from) = (&histories[spot], (*asked).max(newest));
                if history.find(*version, from, *answered).is_none() {
                    return Err(format!(
                        "snapshot {name}, spot {spot}: holds write {version}, but also a write submitted at {newest}, \
                         when a later one had been acknowledged here: {history:?}"
                    ));
                }
            }
            let known = versions.iter().zip(histories).enumerate().map(|(spot, (found, history))| {
                found.unwrap_or_else(|| history.lost(&self.damaged, self.layout.offset(spot)))
            });
            snapshot.content = Content::Known(known.collect());
        }
        Ok(())
    }

    /// Whether a volume found after a crash may hold these versions; if so that is what it holds from now on.
    pub fn judge_crashed(&mut self, volume: &str, found: &[Option<Version>]) -> Result<(), String> {
        let Some(state) = self.volumes.get(volume) else { return Ok(()) };
        for (spot, version) in found.iter().enumerate() {
            let history = &state.spots[spot];
            let may = &history.entries[history.durable..];
            if let Some(version) = version
                && !may.iter().any(|entry| entry.version == *version)
            {
                return Err(format!(
                    "volume {volume}, spot {spot}: holds write {version} after a crash; {history:?}"
                ));
            }
        }
        self.set(volume, found);
        Ok(())
    }

    /// A volume holds what was found.
    pub fn set(&mut self, volume: &str, found: &[Option<Version>]) {
        let Some(state) = self.volumes.get_mut(volume) else { return };
        state.busy.clear();
        for (spot, (history, version)) in state.spots.iter_mut().zip(found).enumerate() {
            let lost = || history.lost(&self.damaged, self.layout.offset(spot));
            *history = History::new(version.unwrap_or_else(lost));
        }
    }

    /// Versions that a block may hold after a crash.
    pub fn after_crash(&self, volume: &str, spot: usize) -> Vec<Version> {
        let Some(volume) = self.volumes.get(volume) else { return Vec::new() };
        let history = &volume.spots[spot];
        history.entries[history.durable..].iter().map(|entry| entry.version).collect()
    }

    /// A volume that begins, or goes on, as a snapshot is.
    pub fn clone_of(&mut self, snapshot: &str, name: &str, write_cache: bool) {
        let Some(Snapshot { size, content: Content::Known(versions) }) = self.snapshots.get(snapshot) else {
            return;
        };
        let spots = versions.iter().map(|version| History::new(*version)).collect();
        let volume = Volume { size: *size, write_cache, spots, busy: BTreeSet::new() };
        self.volumes.insert(name.to_owned(), volume);
        self.family.grew(name, Some(snapshot));
    }

    /// A volume has another size now. What is new reads as zeroes.
    pub fn resize(&mut self, name: &str, size: u64) {
        let spots = self.layout.spots_within(size);
        let Some(volume) = self.volumes.get_mut(name) else { return };
        volume.size = size;
        volume.spots.truncate(spots);
        volume.spots.resize(spots, History::new(0));
    }

    /// What each block may hold at some moment since `from`: one version for a snapshot that was looked at, some for a
    /// volume that is written. `None` when nobody looked yet.
    pub fn versions_since(&self, name: &str, from: Moment) -> Option<Vec<Vec<Version>>> {
        if let Some(known) = self.known(name) {
            return Some(known.iter().map(|version| vec![*version]).collect());
        }
        let spots = self.volumes.get(name)?.spots.len();
        Some((0..spots).map(|spot| self.readable(name, spot, from)).collect())
    }

    /// Volumes and snapshots, and places in them, that hold a block that was damaged. Only to be asked while nothing is
    /// under way.
    pub fn lost_places(&self) -> BTreeSet<(String, u64)> {
        let mut places = BTreeSet::new();
        let mut look = |name: &String, spot: usize, version: Version| {
            let offset = self.layout.offset(spot);
            if self.damaged.contains(&(version, offset)) {
                places.insert((name.clone(), offset));
            }
        };
        for (name, volume) in &self.volumes {
            volume.spots.iter().enumerate().for_each(|(spot, history)| look(name, spot, history.last()));
        }
        for (name, snapshot) in &self.snapshots {
            if let Content::Known(versions) = &snapshot.content {
                versions.iter().enumerate().for_each(|(spot, version)| look(name, spot, *version));
            }
        }
        places
    }

    /// Size of a volume or snapshot.
    pub fn size(&self, name: &str) -> Option<u64> {
        let snapshot = || self.snapshots.get(name).map(|snapshot| snapshot.size);
        self.volumes.get(name).map(|volume| volume.size).or_else(snapshot)
    }

    /// Blocks of data that a volume or snapshot holds, if it is known.
    pub fn referenced(&self, name: &str) -> Option<usize> {
        if let Some(volume) = self.volumes.get(name) {
            let mut count = 0;
            for history in &volume.spots {
                if history.entries[history.entries.len() - 1].acknowledged == NEVER {
                    return None;
                }
                count += usize::from(history.last() != 0);
            }
            return Some(count);
        }
        self.known(name).map(|versions| versions.iter().filter(|version| **version != 0).count())
    }
}
