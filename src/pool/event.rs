//! What happens to a pool that somebody may want to know of. Whoever opens pools says where it goes ([`EventSink`]).
//!
//! How full a pool is and what damage was found is looked at once a second on the home reactor: an event, not a measure.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use super::home::Home;
use super::info::NodeKind;
use super::io::OVERWRITE_RESERVE;
use super::space::Use;
use crate::device::IoError;

/// How often a pool is looked at.
const INTERVAL: Duration = Duration::from_secs(1);
/// How many looks at use and damage there are for each at what ghosts hold.
const LOOKS_PER_GHOST_CARE: u64 = 10;
/// Percent of the room for data in use that are worth a word.
pub const THRESHOLDS: [u8; 3] = [75, 85, 95];
/// Percent that use must fall below a threshold before that is said, so that a pool on the edge does not say it again and
/// again.
const HYSTERESIS: u64 = 5;

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PoolEventKind {
    /// The use of space has come to a threshold, or fell well below it.
    Threshold {
        /// The threshold, in percent.
        percent: u8,
        /// Come to from below.
        rising: bool,
        /// Use, in percent.
        used_percent: u8,
    },
    /// A volume or snapshot was made.
    Created {
        /// Which of both.
        kind: NodeKind,
        /// Its name.
        name: String,
    },
    /// A volume or snapshot was deleted.
    Deleted {
        /// Which of both.
        kind: NodeKind,
        /// The name it had.
        name: String,
    },
    /// Something on the devices is not what it must be.
    Damage {
        /// What, where, and what was done.
        text: String,
    },
}

/// Something that happened to a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolEvent {
    /// The pool's name.
    pub pool: String,
    /// What.
    pub kind: PoolEventKind,
}

/// Where events go. Called on a pool's home reactor, so it must not wait.
pub type EventSink = Arc<dyn Fn(PoolEvent) + Send + Sync>;

/// How far the looking has come.
#[derive(Default)]
pub(super) struct Seen {
    /// Which thresholds are passed.
    above: [bool; THRESHOLDS.len()],
    /// How many texts of the damage that is no shard's were told.
    damage: usize,
    /// How often was looked.
    looks: u64,
}

impl Seen {
    /// Which thresholds are crossed when `used` of `room` is in use, with the direction.
    fn cross(&mut self, used: u64, room: u64) -> Vec<(u8, bool)> {
        let mut crossed = Vec::new();
        for (above, percent) in self.above.iter_mut().zip(THRESHOLDS) {
            let now = match *above {
                false => used * 100 >= room * u64::from(percent),
                true => used * 100 >= room * (u64::from(percent) - HYSTERESIS),
            };
            if now != *above && room > 0 {
                *above = now;
                crossed.push((percent, now));
            }
        }
        crossed
    }
}

impl Home {
    /// Tells whoever wants to know. What is being received is nobody's business yet.
    pub(super) fn tell(&self, kind: PoolEventKind) {
        if let PoolEventKind::Created { name, .. } | PoolEventKind::Deleted { name, .. } = &kind
            && super::receive::is_receiving(name)
        {
            return;
        }
        if let Some(sink) = &self.events {
            sink(PoolEvent { pool: self.records.borrow().pool.name.clone(), kind });
        }
    }

    /// Looks at the pool from time to time while it is open.
    pub(super) fn keep_watch(&self) {
        let key = self.owners.key;
        crate::reactor::spawn(async move {
            let mut seen = Seen::default();
            while let Some(home) = super::lifecycle::home(key)
                && !home.closed.get()
                && home.watch(&mut seen).await.is_ok()
            {
                drop(home);
                crate::reactor::sleep(INTERVAL).await;
            }
        });
    }

    async fn watch(&self, seen: &mut Seen) -> Result<(), IoError> {
        seen.looks += 1;
        if seen.looks.is_multiple_of(LOOKS_PER_GHOST_CARE)
            && let Err(error) = self.look_after_ghosts().await
        {
            tracing::warn!("what deleted snapshots hold for nobody is looked for later: {error}");
        }
        match self.events {
            Some(_) => self.look(seen).await,
            None => Ok(()),
        }
    }

    async fn look(&self, seen: &mut Seen) -> Result<(), IoError> {
        let shards = self.owners.each(|shard| async move {
            let free = shard.state.borrow().space.free_blocks(Use::Data);
            (free, shard.damage.borrow_mut().take_news())
        });
        let shards = shards.await?;
        let (spare, total) = {
            let regions = &self.records.borrow().regions;
            (regions.spare(), regions.total() - regions.reserve())
        };
        let region = u64::from(self.geometry.region_blocks);
        // What a shard keeps for overwrites is not there for new data.
        let kept = |free: &u64| free.saturating_sub(OVERWRITE_RESERVE);
        let free = spare * region + shards.iter().map(|(free, _)| kept(free)).sum::<u64>();
        let room = (total * region).saturating_sub(shards.len() as u64 * OVERWRITE_RESERVE);
        let used = room.saturating_sub(free);
        let used_percent = (used * 100).checked_div(room).unwrap_or(0).min(100) as u8;
        for (percent, rising) in seen.cross(used, room) {
            self.tell(PoolEventKind::Threshold { percent, rising, used_percent });
        }
        let own: Vec<String> = {
            let damage = self.damage.borrow();
            // Fewer than were told: they were forgotten on demand.
            let told = if seen.damage > damage.len() { 0 } else { seen.damage };
            seen.damage = damage.len();
            damage[told..].to_vec()
        };
        let found = own.into_iter().chain(shards.into_iter().flat_map(|(_, damage)| damage));
        found.for_each(|text| self.tell(PoolEventKind::Damage { text }));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threshold_is_told_once_each_way() {
        let mut seen = Seen::default();
        assert_eq!(seen.cross(74, 100), []);
        assert_eq!(seen.cross(96, 100), [(75, true), (85, true), (95, true)]);
        assert_eq!(seen.cross(94, 100), []);
        assert_eq!(seen.cross(90, 100), []);
        assert_eq!(seen.cross(89, 100), [(95, false)]);
        assert_eq!(seen.cross(95, 100), [(95, true)]);
        assert_eq!(seen.cross(0, 100), [(75, false), (85, false), (95, false)]);
        assert_eq!(seen.cross(0, 0), []);
    }
}
