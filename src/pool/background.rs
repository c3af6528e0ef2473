//! What a pool does by itself on its home reactor: it takes deleted nodes apart, and deals regions to its shards.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::time::Duration;

use super::catalog::Transaction;
use super::error::PoolError;
use super::home::Home;
use super::node::{Lineage, NodeId, Reaping};
use super::records::{Changes, Chore, NodeRecord, Records};
use super::space::{Ask, RegionId, RegionKind, Use};
use crate::device::IoError;

/// Blocks that may be nobody's for which a ghost is thinned again.
const STALE_MIN: u64 = 2048;
/// When deleting is tried again that failed for want of space.
const RETRY: Duration = Duration::from_secs(5);

impl Home {
    /// Starts taking apart what was deleted, unless that is under way.
    pub(super) fn wake_reaper(&self) {
        if !self.reaper.replace(true) {
            let key = self.owners.key;
            crate::reactor::spawn(async move {
                while let Some(home) = super::lifecycle::home(key)
                    && !home.closed.get()
                {
                    let Err(error) = home.reap().await else {
                        home.reaper.set(false);
                        return;
                    };
                    tracing::warn!("deleting in the background goes on later: {error}");
                    drop(home);
                    crate::reactor::sleep(RETRY).await;
                }
            });
        }
    }

    /// Does what is to be done about deleted nodes, one at a time.
    async fn reap(&self) -> Result<(), PoolError> {
        while let Some((node, chore)) = self.next_chore().await? {
            if self.closed.get() {
                return Ok(());
            }
            match chore {
                Chore::Thin => self.thin(node).await?,
                Chore::Drop | Chore::HandDown => self.take_apart(node).await?,
            }
        }
        Ok(())
    }

    async fn next_chore(&self) -> Result<Option<(NodeId, Chore)>, PoolError> {
        // What a shard has begun, perhaps before a crash, must be ended before anything else is begun.
        let begun = self.owners.each(|shard| async move { shard.state.borrow().nodes.begun() }).await?;
        let mut begun: Vec<Reaping> = begun.into_iter().flatten().collect();
        // A thinning that a shard remembers may be one that was ended, and that no commit of the shard has come after.
        begun.sort_by_key(|reaping| reaping.thinning);
        for reaping in begun {
            let node = reaping.node;
            let chore = {
                let records = self.records.borrow();
                match (records.node(node), reaping.thinning) {
                    (None, _) => None,
                    (Some(record), true) => (!record.thinned).then_some(Chore::Thin),
                    (Some(_), false) => Some(Chore::HandDown),
                }
            };
            match chore {
                Some(chore) => return Ok(Some((node, chore))),
                None => drop(self.owners.each(move |shard| async move { shard.end_reaping(node) }).await?),
            }
        }
        let records = self.records.borrow();
        let mut waiting = records.chores().filter(|(_, node)| !self.holds.has(*node));
        Ok(waiting.next().map(|(chore, node)| (node, chore)))
    }

    /// Frees what a deleted node alone holds, and keeps the node for what others share.
    async fn thin(&self, node: NodeId) -> Result<(), PoolError> {
        for result in self.owners.each(move |shard| async move { shard.thin(node).await }).await? {
            result?;
        }
        self.looked_at.borrow_mut().insert(node);
        let _lock = self.operations.acquire(1).await;
        let mut changes = Changes::default();
        let lineage = {
            let records = self.records.borrow();
            let record = records.node(node).ok_or(IoError::Gone)?;
            let ghost = NodeRecord { ghost: true, thinned: true, ..record.clone() };
            records.unsettle(ghost.parent, &mut changes);
            let lineage = ghost.lineage();
            changes.node(node, Some(ghost));
            lineage
        };
        self.commit(changes).await?;
        let told = self.owners.each(move |shard| async move {
            shard.set_lineage(node, lineage);
            shard.end_reaping(node);
        });
        told.await?;
        Ok(())
    }

    /// Has those ghosts thinned again of whose blocks many may have become nobody's, as what grew from them was written
    /// over; any, when the pool has no room left.
    pub(super) async fn look_after_ghosts(&self) -> Result<(), PoolError> {
        if !self.records.borrow().has_ghosts() {
            return Ok(());
        }
        let mut sums: BTreeMap<NodeId, (u64, u64)> = BTreeMap::new();
        let stale = self.owners.each(|shard| async move { shard.state.borrow().nodes.stale() }).await?;
        for (node, count, held) in stale.into_iter().flatten() {
            let sum = sums.entry(node).or_default();
            *sum = (sum.0 + count, sum.1 + held);
        }
        let _lock = self.operations.acquire(1).await;
        let mut changes = Changes::default();
        {
            let records = self.records.borrow();
            let full = records.regions.spare() == 0;
            let worthwhile =
                |count: u64, held: u64| count >= if full { STALE_MIN / 8 } else { STALE_MIN.max(held / 4) };
            for (node, _) in sums.into_iter().filter(|(_, (count, held))| worthwhile(*count, *held)) {
                records.unsettle(Some(node.0), &mut changes);
            }
            // Of what came before this opening nobody has counted anything.
            let looked_at = self.looked_at.borrow();
            let unknown = records.nodes().filter(|(id, node)| node.ghost && !looked_at.contains(id));
            for (id, _) in unknown.filter(|_| full) {
                records.unsettle(Some(id.0), &mut changes);
            }
        }
        if !changes.is_empty() {
            self.commit(changes).await?;
            self.wake_reaper();
        }
        Ok(())
    }

    /// Frees what a deleted node alone holds, and leaves the rest to the one that grew from it, if any did.
    async fn take_apart(&self, node: NodeId) -> Result<(), PoolError> {
        let heir = self.records.borrow().children(node).next();
        for result in self.owners.each(move |shard| async move { shard.reap(node).await }).await? {
            result?;
        }
        let _lock = self.operations.acquire(1).await;
        let mut changes = Changes::default();
        let lineage = {
            let records = self.records.borrow();
            let record = records.node(node).ok_or(IoError::Gone)?;
            // Ghosts keep nothing for a ghost; but what went before it, they may have kept for that.
            if !(record.ghost && record.thinned) {
                records.unsettle(record.parent, &mut changes);
            }
            changes.node(node, None);
            heir.and_then(|heir| records.node(heir)).map(|heir| {
                let thinned = false;
                let heir = NodeRecord { parent: record.parent, thinned, ..heir.clone() };
                (heir.lineage(), heir)
            })
        };
        let lineage: Option<Lineage> = lineage.zip(heir).map(|((lineage, record), heir)| {
            changes.node(heir, Some(record));
            lineage
        });
        self.commit(changes).await?;
        let told = self.owners.each(move |shard| async move {
            if let (Some(heir), Some(lineage)) = (heir, lineage) {
                shard.set_lineage(heir, lineage);
            }
            shard.forget(node);
        });
        told.await?;
        Ok(())
    }

    /// More regions for a shard.
    pub(super) async fn grant(&self, shard: u16, what: Use, ask: Ask) -> Vec<(RegionId, RegionKind)> {
        let granted = self.records.borrow_mut().regions.grant(shard, what, ask);
        if !granted.is_empty() && self.commit_regions().await.is_err() {
            let regions: Vec<RegionId> = granted.iter().map(|(id, _)| *id).collect();
            self.records.borrow_mut().regions.give_back(shard, &regions);
            return Vec::new();
        }
        granted
    }

    async fn commit_regions(&self) -> Result<(), PoolError> {
        let mut transaction = Transaction::new();
        self.records.borrow_mut().regions.put(&mut transaction);
        self.commit_transaction(transaction).await
    }

    /// Regions that a shard no longer uses.
    pub(super) async fn give_back(&self, shard: u16, regions: Vec<RegionId>) {
        self.records.borrow_mut().regions.give_back(shard, &regions);
        // If this fails the shard still owns them, empty, after the next import.
        if self.commit_regions().await.is_ok() {
            let told = self.owners.each(|shard| async move {
                shard.full.set(false);
                shard.scarce.set(false);
                shard.changed.notify();
            });
            let _ = told.await;
        }
    }
}

impl Records {
    /// The nearest ghost above a node that went holds perhaps what nobody else has now.
    fn unsettle(&self, parent: Option<u32>, changes: &mut Changes) {
        if let Some(id) = parent.map(NodeId)
            && let Some(ghost) = self.node(id).filter(|ghost| ghost.thinned)
        {
            changes.node(id, Some(NodeRecord { thinned: false, ..ghost.clone() }));
        }
    }
}
