//! The damage that a shard came upon since it was opened: what, where on the devices, and where in which volume.
//!
//! Bounded and without repetition: a block that is found damaged again is the same entry, seen once more. Nothing of it
//! is stored; what is still damaged will be found again.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use serde::Serialize;

use super::finding::{Extent, Kind, Place};
use super::node::NodeId;
use super::pointer::Epoch;

/// The most entries that one shard keeps.
const ENTRIES_MAX: usize = 1000;

/// What became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DamageState {
    /// Written again from its other copy.
    Healed,
    /// Its other copy is whole, but it could not be written again.
    Degraded,
    /// It cannot be read.
    Lost,
}

/// A place in a volume's or snapshot's tree, within one shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spot {
    /// The node in which it was seen.
    pub node: NodeId,
    /// 0: a block of data; else the pages between it and the data, itself included.
    pub height: u32,
    /// Its first slot.
    pub slot: u64,
    /// Slots that it holds, or leads to.
    pub count: u64,
}

/// Something damaged.
#[derive(Debug, Clone)]
pub struct Damage {
    /// What kind of thing.
    pub kind: Kind,
    /// What became of it.
    pub state: DamageState,
    /// Where on the devices.
    pub place: Place,
    /// Where in the volumes.
    pub spot: Option<Spot>,
    /// The epoch in which it was written.
    pub epoch: Option<Epoch>,
    /// For people.
    pub what: String,
    /// Seconds since 1970 when it was first seen.
    pub since: u64,
    /// Seconds since 1970 when it was last seen.
    pub seen: u64,
    /// How often it was seen.
    pub times: u64,
}

/// Damage as programs see it.
#[derive(Debug, Clone, Serialize)]
pub struct DamageInfo {
    /// What kind of thing.
    pub kind: Kind,
    /// What became of it.
    pub state: DamageState,
    /// For people.
    pub what: String,
    /// Where on the devices.
    pub place: Place,
    /// The shard.
    pub shard: u16,
    /// The volumes and snapshots that have it now, and where. Empty for what is in none.
    pub extents: Vec<Extent>,
    /// The epoch in which it was written.
    pub epoch: Option<Epoch>,
    /// Seconds since 1970 when it was first seen.
    pub since: u64,
    /// How often it was seen.
    pub times: u64,
}

/// A shard's list.
#[derive(Default)]
pub struct DamageLog {
    entries: BTreeMap<(String, u64, Kind), Damage>,
    more: u64,
    /// What was added and is still to be told.
    news: Vec<String>,
}

impl DamageLog {
    /// Adds what was seen now. True when it was not known, or was healed since.
    pub fn add(&mut self, damage: Damage) -> bool {
        let key = (damage.place.device.clone(), damage.place.offset, damage.kind);
        let full = self.entries.len() >= ENTRIES_MAX;
        match self.entries.get_mut(&key) {
            Some(known) => {
                let news = known.state != damage.state;
                let (spot, epoch) = (damage.spot.or(known.spot), damage.epoch.or(known.epoch));
                let what = damage.what.clone();
                *known = Damage { since: known.since, times: known.times + 1, spot, epoch, ..damage };
                if news {
                    self.tell(what);
                }
                news
            }
            None if full => {
                self.more += 1;
                false
            }
            None => {
                self.tell(damage.what.clone());
                self.entries.insert(key, damage);
                true
            }
        }
    }

    /// Adds something worth an event that has no place.
    pub fn tell(&mut self, text: String) {
        if self.news.len() < ENTRIES_MAX {
            self.news.push(text);
        }
    }

    /// What was added since this was last asked, in the order in which it was found.
    pub fn take_news(&mut self) -> Vec<String> {
        std::mem::take(&mut self.news)
    }

    /// Forgets a place that is whole again, or holds nothing any more.
    pub fn forget(&mut self, place: &Place, kind: Kind) {
        self.entries.remove(&(place.device.clone(), place.offset, kind));
    }

    /// Forgets what was lost and was not seen again since `time`, when everything was looked at.
    pub fn forget_unseen(&mut self, time: u64) {
        self.entries.retain(|_, damage| damage.state == DamageState::Healed || damage.seen >= time);
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.more = 0;
    }

    /// The entries by device and offset.
    pub fn iter(&self) -> impl Iterator<Item = &Damage> {
        self.entries.values()
    }

    /// A text for each entry, and one for those that were too many.
    pub fn texts(&self) -> Vec<String> {
        let mut texts: Vec<String> = self.entries.values().map(|damage| damage.what.clone()).collect();
        if self.more > 0 {
            texts.push(format!("{} more places are damaged", self.more));
        }
        texts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn damage(offset: u64, state: DamageState) -> Damage {
        Damage {
            kind: Kind::Data,
            state,
            place: Place { device: "ram:1GiB".into(), offset, length: 4096 },
            spot: None,
            epoch: Some(3),
            what: format!("byte {offset}"),
            since: offset,
            seen: offset,
            times: 1,
        }
    }

    #[test]
    fn the_same_place_is_one_entry_and_the_list_is_bounded() {
        let mut log = DamageLog::default();
        assert!(log.add(damage(4096, DamageState::Lost)));
        assert!(!log.add(Damage { since: 9, ..damage(4096, DamageState::Lost) }), "nothing new");
        assert!(log.add(damage(4096, DamageState::Healed)), "it was healed");
        let only: Vec<&Damage> = log.iter().collect();
        assert_eq!((only.len(), only[0].times, only[0].since), (1, 3, 4096));
        assert_eq!(log.take_news().len(), 2, "found, and healed");
        assert!(log.add(damage(0, DamageState::Lost)));
        assert_eq!(log.take_news(), ["byte 0"], "what is new, not what is last by its place");
        log.forget(&damage(0, DamageState::Lost).place, Kind::Data);
        for at in 0..2000 {
            log.add(damage((at + 1000) << 12, DamageState::Lost));
        }
        assert_eq!(log.iter().count(), ENTRIES_MAX);
        assert_eq!(log.texts().last().unwrap(), "1001 more places are damaged");
        log.forget(&damage(4096, DamageState::Lost).place, Kind::Data);
        assert_eq!(log.iter().count(), ENTRIES_MAX - 1);
        log.clear();
        assert!(log.texts().is_empty());
    }
}
