//! What a pool does by itself on its home reactor: it takes deleted nodes apart, and deals regions to its shards.
#![forbid(unsafe_code)]

use std::time::Duration;

use super::catalog::Transaction;
use super::error::PoolError;
use super::home::Home;
use super::node::{Lineage, NodeId};
use super::records::{Changes, NodeRecord};
use super::space::{Ask, RegionId, RegionKind, Use};

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

    /// Takes deleted nodes apart, one at a time, children first. A deleted node with two children or more waits until
    /// one of them is left: until then each block of it may be anybody's.
    async fn reap(&self) -> Result<(), PoolError> {
        loop {
            // What a shard has begun, perhaps before a crash, must be ended before anything else is begun.
            let begun = self.owners.each(|shard| async move { shard.state.borrow().nodes.reaping() }).await?;
            let begun = begun.into_iter().flatten().map(|(node, _)| node).next();
            let next = {
                let records = self.records.borrow();
                let deleting = records.nodes().filter(|(_, node)| node.deleting).map(|(id, _)| id);
                let deleting = deleting.filter(|id| !self.pins.has(*id));
                let mut candidates: Vec<(usize, NodeId)> = deleting
                    .map(|id| (records.children(id).len(), id))
                    .filter(|(count, _)| *count < 2)
                    .collect();
                candidates.sort_unstable_by_key(|(count, id)| (Some(*id) != begun, *count, *id));
                candidates.first().map(|(_, id)| (*id, records.children(*id).next()))
            };
            let Some((node, heir)) = next else { return Ok(()) };
            if self.closed.get() {
                return Ok(());
            }
            for result in self.owners.each(move |shard| async move { shard.reap(node, heir).await }).await? {
                result?;
            }
            let _lock = self.operations.acquire(1).await;
            // The one child may have become another meanwhile only by being deleted; ask again.
            let mut changes = Changes::default();
            let mut heirs: Vec<(NodeId, Lineage)> = Vec::new();
            {
                let records = self.records.borrow();
                let parent = records.node(node).and_then(|record| record.parent);
                changes.node(node, None);
                for child in records.children(node) {
                    if let Some(record) = records.node(child) {
                        let record = NodeRecord { parent, ..record.clone() };
                        heirs.push((child, record.lineage()));
                        changes.node(child, Some(record));
                    }
                }
            }
            self.commit(changes).await?;
            self.owners
                .each(move |shard| async move {
                    for (child, lineage) in &heirs {
                        shard.set_lineage(*child, *lineage);
                    }
                    shard.forget(node);
                })
                .await?;
        }
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
