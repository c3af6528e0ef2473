//! What a pool does by itself on its home reactor: it takes deleted nodes apart, and deals regions to its shards.
#![forbid(unsafe_code)]

use super::catalog::Transaction;
use super::error::PoolError;
use super::home::Home;
use super::node::{Lineage, NodeId};
use super::space::{Ask, RegionId, RegionKind, Use};

impl Home {
    /// Starts taking apart what was deleted, unless that is under way.
    pub(super) fn wake_reaper(&self) {
        if !self.reaper.replace(true) {
            let key = self.owners.key;
            crate::reactor::spawn(async move {
                if let Some(home) = super::lifecycle::home(key) {
                    if let Err(error) = home.reap().await {
                        tracing::warn!("deleting in the background stopped: {error}");
                    }
                    home.reaper.set(false);
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
                let deleting = records.nodes.iter().filter(|(_, node)| node.deleting).map(|(id, _)| *id);
                let mut candidates: Vec<(usize, NodeId)> = deleting
                    .map(|id| (records.children(id).len(), id))
                    .filter(|(count, _)| *count < 2)
                    .collect();
                candidates.sort_unstable_by_key(|(count, id)| (Some(*id) != begun, *count, *id));
                candidates.first().map(|(_, id)| (*id, records.children(*id).first().copied()))
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
            let (transaction, heirs) = {
                let mut records = self.records.borrow_mut();
                let parent = records.nodes.get(&node).and_then(|record| record.parent);
                records.nodes.remove(&node);
                let mut transaction = Transaction::new();
                records.put_node(&mut transaction, node);
                let mut heirs: Vec<(NodeId, Lineage)> = Vec::new();
                for child in records.children(node) {
                    if let Some(record) = records.nodes.get_mut(&child) {
                        record.parent = parent;
                        heirs.push((child, record.lineage()));
                    }
                    records.put_node(&mut transaction, child);
                }
                (transaction, heirs)
            };
            self.commit(transaction).await?;
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
        let mut transaction = Transaction::new();
        let granted = {
            let mut records = self.records.borrow_mut();
            let granted = records.regions.grant(shard, what, ask);
            records.regions.put(&mut transaction);
            granted
        };
        match granted.is_empty() || self.commit(transaction).await.is_ok() {
            true => granted,
            false => Vec::new(),
        }
    }

    /// Regions that a shard no longer uses.
    pub(super) async fn give_back(&self, shard: u16, regions: Vec<RegionId>) {
        let mut transaction = Transaction::new();
        {
            let mut records = self.records.borrow_mut();
            records.regions.give_back(shard, &regions);
            records.regions.put(&mut transaction);
        }
        // If this fails the shard still owns them, empty, after the next import.
        if self.commit(transaction).await.is_ok() {
            let told = self.owners.each(|shard| async move {
                shard.full.set(false);
                shard.scarce.set(false);
                shard.changed.notify();
            });
            let _ = told.await;
        }
    }
}
