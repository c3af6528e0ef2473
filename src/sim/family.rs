//! Who grew from whom, and who is pinned: what the catalog must say of each volume and snapshot.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};

/// What is known of one volume or snapshot beside its bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Kin {
    /// The snapshot that it grew from; of those that are still there the nearest.
    pub parent: Option<String>,
    /// Whose pins it has.
    pub pins: BTreeSet<String>,
}

/// All of a pool's, by name.
#[derive(Debug, Clone, Default)]
pub(super) struct Family {
    kin: BTreeMap<String, Kin>,
}

impl Family {
    /// What is known of `name`; nothing when it is not there.
    pub fn of(&self, name: &str) -> Kin {
        self.kin.get(name).cloned().unwrap_or_default()
    }

    /// A volume is there that grew from `parent`, or has gone back to it.
    pub fn grew(&mut self, name: &str, parent: Option<&str>) {
        self.kin.entry(name.to_owned()).or_default().parent = parent.map(str::to_owned);
    }

    /// A snapshot was taken: it stands between its volume and what that grew from.
    pub fn taken(&mut self, volume: &str, snapshot: &str) {
        let above = self.of(volume).parent;
        self.grew(snapshot, above.as_deref());
        self.grew(volume, Some(snapshot));
    }

    /// It was deleted: what grew from it grew from its parent.
    pub fn gone(&mut self, name: &str) {
        let Some(kin) = self.kin.remove(name) else { return };
        for other in self.kin.values_mut().filter(|other| other.parent.as_deref() == Some(name)) {
            other.parent.clone_from(&kin.parent);
        }
    }

    /// It has another name.
    pub fn renamed(&mut self, name: &str, new: &str) {
        let Some(kin) = self.kin.remove(name) else { return };
        self.kin.insert(new.to_owned(), kin);
        for other in self.kin.values_mut().filter(|other| other.parent.as_deref() == Some(name)) {
            other.parent = Some(new.to_owned());
        }
    }

    /// `by` pinned it, or no longer does.
    pub fn pin(&mut self, name: &str, by: &str, pinned: bool) {
        let pins = &mut self.kin.entry(name.to_owned()).or_default().pins;
        match pinned {
            true => pins.insert(by.to_owned()),
            false => pins.remove(by),
        };
    }

    /// Names that are pinned, with one of those who pinned them.
    pub fn pinned(&self) -> Vec<(String, String)> {
        let pins = |(name, kin): (&String, &Kin)| {
            kin.pins.iter().map(|by| (name.clone(), by.clone())).collect::<Vec<_>>()
        };
        self.kin.iter().flat_map(pins).collect()
    }
}
