//! Who owns which region of a pool's devices, packed for the catalog: eight bytes a region.
//!
//! | key | value |
//! |---|---|
//! | `region/<vdev>/<page>` | 256 regions: owner u16 (0 = nobody, else shard + 1), kind u8, 0, twin u32 |
#![forbid(unsafe_code)]

use std::collections::BTreeSet;

use super::catalog::Transaction;
use super::label::Geometry;
use super::space::{Ask, RegionId, RegionKind, Use};

const REGIONS_PER_PAGE: usize = 256;
const ENTRY_BYTES: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    Nobody,
    Data(u16),
    Metadata(u16, RegionId),
    /// Second copies of another region.
    Twin(u16, RegionId),
}

/// Which shard owns which region.
pub struct Regions {
    owners: Vec<Vec<Owner>>,
    free: Vec<BTreeSet<u32>>,
    dirty: BTreeSet<(usize, usize)>,
    next_vdev: usize,
    geometry: Geometry,
}

impl Regions {
    /// All regions of `vdevs` devices, owned by nobody.
    pub fn new(geometry: Geometry, vdevs: usize) -> Regions {
        let count = geometry.regions();
        // All pages are stored from the beginning: the catalog does not grow as regions are dealt out.
        let pages = (count as usize).div_ceil(REGIONS_PER_PAGE);
        Regions {
            owners: vec![vec![Owner::Nobody; count as usize]; vdevs],
            free: vec![(0..count).collect(); vdevs],
            dirty: (0..vdevs).flat_map(|vdev| (0..pages).map(move |page| (vdev, page))).collect(),
            next_vdev: 0,
            geometry,
        }
    }

    /// Regions of all devices.
    pub fn total(&self) -> u64 {
        self.owners.iter().map(|owners| owners.len() as u64).sum()
    }

    /// Regions that nobody owns.
    pub fn free_count(&self) -> u64 {
        self.free.iter().map(|free| free.len() as u64).sum()
    }

    /// Regions that data may still take.
    pub fn spare(&self) -> u64 {
        self.free_count().saturating_sub(self.reserve())
    }

    /// Regions that only metadata may take.
    pub fn reserve(&self) -> u64 {
        (self.total() / 32).max(4)
    }

    /// The regions of one shard.
    pub fn of(&self, shard: u16) -> Vec<(RegionId, RegionKind)> {
        let mut out = Vec::new();
        for (vdev, owners) in self.owners.iter().enumerate() {
            for (index, owner) in owners.iter().enumerate() {
                let id = RegionId::new(vdev as u8, index as u32);
                match *owner {
                    Owner::Data(owner) if owner == shard => out.push((id, RegionKind::Data)),
                    Owner::Metadata(owner, twin) if owner == shard => {
                        out.push((id, RegionKind::Metadata { twin }));
                    }
                    _ => {}
                }
            }
        }
        out
    }

    fn set(&mut self, id: RegionId, owner: Owner) {
        let (vdev, index) = (usize::from(id.vdev()), id.index() as usize);
        self.owners[vdev][index] = owner;
        match owner {
            Owner::Nobody => self.free[vdev].insert(id.index()),
            _ => self.free[vdev].remove(&id.index()),
        };
        self.dirty.insert((vdev, index / REGIONS_PER_PAGE));
    }

    /// Takes regions for a shard: adjacent ones where possible, the devices in turn.
    pub fn grant(&mut self, shard: u16, what: Use, ask: Ask) -> Vec<(RegionId, RegionKind)> {
        if ask == Ask::Plenty && self.free_count() < self.total() / 8 {
            return Vec::new();
        }
        match what {
            Use::Data => self.grant_data(shard),
            Use::Metadata => self.grant_metadata(shard).into_iter().collect(),
        }
    }

    fn grant_data(&mut self, shard: u16) -> Vec<(RegionId, RegionKind)> {
        let spare = self.spare();
        // Up to 32 MiB at a time, and never more than a fair part of what is left.
        let at_once = (32 << 20) / self.geometry.region_bytes();
        let fair = spare / (4 * u64::from(self.geometry.shards)).max(1);
        let count = at_once.min(fair).max(1).min(spare);
        let mut granted = Vec::new();
        for _ in 0..count {
            let Some(id) = self.take_free(None) else { break };
            self.set(id, Owner::Data(shard));
            granted.push((id, RegionKind::Data));
        }
        granted
    }

    fn grant_metadata(&mut self, shard: u16) -> Option<(RegionId, RegionKind)> {
        if self.free_count() < 2 {
            return None;
        }
        let first = self.take_free(None)?;
        self.set(first, Owner::Metadata(shard, first));
        let Some(twin) = self.take_free(Some(first)) else {
            self.set(first, Owner::Nobody);
            return None;
        };
        self.set(first, Owner::Metadata(shard, twin));
        self.set(twin, Owner::Twin(shard, first));
        Some((first, RegionKind::Metadata { twin }))
    }

    /// A free region: the lowest of the next device that has one; or, as a twin, one far from `of`.
    fn take_free(&mut self, of: Option<RegionId>) -> Option<RegionId> {
        let vdevs = self.free.len();
        match of {
            None => {
                for step in 0..vdevs {
                    let vdev = (self.next_vdev + step) % vdevs;
                    if let Some(index) = self.free[vdev].first() {
                        self.next_vdev = (vdev + 1) % vdevs;
                        return Some(RegionId::new(vdev as u8, *index));
                    }
                }
                None
            }
            Some(first) => {
                for step in 1..=vdevs {
                    let vdev = (usize::from(first.vdev()) + step) % vdevs;
                    let from = match vdev == usize::from(first.vdev()) {
                        true => {
                            (first.index() + self.geometry.regions() / 2) % self.geometry.regions().max(1)
                        }
                        false => 0,
                    };
                    let free = &self.free[vdev];
                    if let Some(index) = free.range(from..).next().or_else(|| free.first()) {
                        return Some(RegionId::new(vdev as u8, *index));
                    }
                }
                None
            }
        }
    }

    /// What the table says twice or against itself.
    pub fn contradictions(&self) -> Vec<String> {
        let owner = |id: RegionId| self.owners.get(usize::from(id.vdev()))?.get(id.index() as usize).copied();
        let mut wrong = Vec::new();
        for (vdev, owners) in self.owners.iter().enumerate() {
            for (index, of) in owners.iter().enumerate() {
                let id = RegionId::new(vdev as u8, index as u32);
                let (other, expected, what) = match *of {
                    Owner::Metadata(shard, twin) => (twin, Owner::Twin(shard, id), "second copies"),
                    Owner::Twin(shard, first) => (first, Owner::Metadata(shard, id), "first copies"),
                    _ => continue,
                };
                if other == id || owner(other) != Some(expected) {
                    wrong.push(format!(
                        "region {index} of device {vdev} has its {what} in region {} of device {}, which is for something else",
                        other.index(),
                        other.vdev()
                    ));
                }
            }
        }
        wrong
    }

    /// Takes regions back, those of metadata with their twins.
    pub fn give_back(&mut self, shard: u16, regions: &[RegionId]) {
        for id in regions {
            let owner =
                self.owners.get(usize::from(id.vdev())).and_then(|owners| owners.get(id.index() as usize));
            match owner.copied() {
                Some(Owner::Data(owner)) if owner == shard => self.set(*id, Owner::Nobody),
                Some(Owner::Metadata(owner, twin)) if owner == shard => {
                    self.set(*id, Owner::Nobody);
                    self.set(twin, Owner::Nobody);
                }
                _ => {}
            }
        }
    }

    /// Adds what changed since the last call to a transaction.
    pub fn put(&mut self, transaction: &mut Transaction) {
        for (vdev, page) in std::mem::take(&mut self.dirty) {
            let first = page * REGIONS_PER_PAGE;
            let mut value = Vec::with_capacity(REGIONS_PER_PAGE * ENTRY_BYTES);
            for owner in self.owners[vdev].iter().skip(first).take(REGIONS_PER_PAGE) {
                let (shard, kind, twin) = match owner {
                    Owner::Nobody => (0, 0, 0),
                    Owner::Data(shard) => (shard + 1, 1, 0),
                    Owner::Metadata(shard, twin) => (shard + 1, 2, twin.0),
                    Owner::Twin(shard, first) => (shard + 1, 3, first.0),
                };
                value.extend_from_slice(&u16::to_le_bytes(shard));
                value.extend_from_slice(&[kind, 0]);
                value.extend_from_slice(&u32::to_le_bytes(twin));
            }
            transaction.put(format!("region/{vdev:02x}/{page:06x}"), value);
        }
    }

    /// Reads one page of the stored table.
    pub fn load(&mut self, key: &str, value: &[u8]) -> Result<(), &'static str> {
        let mut parts = key.split('/').skip(1).map(|hex| usize::from_str_radix(hex, 16));
        let (Some(Ok(vdev)), Some(Ok(page))) = (parts.next(), parts.next()) else {
            return Err("no page in the key");
        };
        self.dirty.remove(&(vdev, page));
        for (i, entry) in value.chunks_exact(ENTRY_BYTES).enumerate() {
            let index = page * REGIONS_PER_PAGE + i;
            let known = self.owners.get(vdev).is_some_and(|owners| index < owners.len());
            if !known {
                return Err("a region outside of the devices");
            }
            let id = RegionId::new(vdev as u8, index as u32);
            let shard = u16::from_le_bytes([entry[0], entry[1]]);
            let other = RegionId(u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]));
            if shard > self.geometry.shards {
                return Err("a region of a shard that the pool does not have");
            }
            let inside = self
                .owners
                .get(usize::from(other.vdev()))
                .is_some_and(|o| (other.index() as usize) < o.len());
            let owner = match (shard, entry[2]) {
                (0, 0) => Owner::Nobody,
                (1.., 1) => Owner::Data(shard - 1),
                (1.., 2) if inside => Owner::Metadata(shard - 1, other),
                (1.., 3) if inside => Owner::Twin(shard - 1, other),
                _ => return Err("a region of an unknown kind"),
            };
            if owner != Owner::Nobody {
                self.set(id, owner);
            }
        }
        self.dirty.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_twins_lie_far_apart_or_on_another_device() {
        let geometry = Geometry::choose(64 << 20, 64 << 20, 2, None);
        let mut one = Regions::new(geometry, 1);
        let (first, RegionKind::Metadata { twin }) = one.grant(0, Use::Metadata, Ask::Needed)[0] else {
            panic!()
        };
        assert!(twin.index().abs_diff(first.index()) >= geometry.regions() / 2);
        let mut two = Regions::new(geometry, 2);
        for _ in 0..3 {
            let (first, RegionKind::Metadata { twin }) = two.grant(1, Use::Metadata, Ask::Needed)[0] else {
                panic!()
            };
            assert_ne!(first.vdev(), twin.vdev());
        }
        assert_eq!(two.of(1).len(), 3);
        assert_eq!(two.free_count(), two.total() - 6);
    }

    #[test]
    fn data_leaves_a_reserve_that_metadata_may_take() {
        let geometry = Geometry::choose(64 << 20, 64 << 20, 2, None);
        let mut regions = Regions::new(geometry, 1);
        let mut given = Vec::new();
        loop {
            let granted = regions.grant(0, Use::Data, Ask::Needed);
            if granted.is_empty() {
                break;
            }
            given.extend(granted.into_iter().map(|(id, _)| id));
        }
        assert!(regions.free_count() >= 4);
        assert_eq!(regions.grant(1, Use::Metadata, Ask::Needed).len(), 1);
        regions.give_back(1, &given);
        assert_eq!(regions.of(0).len(), given.len(), "only the owner gives back");
        regions.give_back(0, &given);
        assert_eq!(regions.free_count(), regions.total() - 2);
    }
}
