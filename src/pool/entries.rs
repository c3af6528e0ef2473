//! Checking what the catalog says, entry by entry: names are unique, parents are there and older, every volume has its
//! head and every head its volume.
//!
//! Opening a pool stops at the first entry that it cannot understand; this goes on and says what all is wrong.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, HashMap};

use serde::Deserialize;

use super::catalog::Catalog;
use super::finding::{Finding, Findings, Kind, Severity};
use super::label::Geometry;
use super::records::{NodeRecord, PoolRecord, VolumeRecord};
use super::regions::Regions;

/// Everything that is wrong with a catalog's entries.
pub fn check_entries(catalog: &Catalog, geometry: Geometry, vdevs: usize) -> Findings {
    let mut check = Entries { findings: Findings::default() };
    let pool: Option<PoolRecord> = match catalog.get("pool") {
        Some(value) => check.parse("pool", value),
        None => {
            check.wrong("pool", "it is missing", "the pool's name");
            None
        }
    };
    let volumes: BTreeMap<u32, VolumeRecord> = check.all(catalog, "volume/");
    let nodes: BTreeMap<u32, NodeRecord> = check.all(catalog, "node/");
    check.names(&volumes, &nodes);
    check.heads(&volumes, &nodes);
    check.lineages(&nodes);
    if let Some(pool) = pool {
        check.numbers(&pool, &volumes, &nodes);
    }
    let mut regions = Regions::new(geometry, vdevs);
    for (key, value) in catalog.scan("region/") {
        if let Err(why) = regions.load(key, value) {
            check.wrong(key, why, "whatever lies in these regions");
        }
    }
    for what in regions.contradictions() {
        let finding = Finding::new(Severity::Contradiction, Kind::Region, what);
        check.findings.push(finding.costs("the second copies of what lies there"));
    }
    check.findings
}

struct Entries {
    findings: Findings,
}

impl Entries {
    fn wrong(&mut self, key: &str, why: impl std::fmt::Display, cost: &str) {
        let what = format!("catalog entry `{key}`: {why}");
        self.findings.push(Finding::new(Severity::Contradiction, Kind::Record, what).costs(cost));
    }

    fn parse<'a, T: Deserialize<'a>>(&mut self, key: &str, value: &'a [u8]) -> Option<T> {
        match serde_json::from_slice(value) {
            Ok(record) => Some(record),
            Err(error) => {
                self.wrong(key, format!("it cannot be understood: {error}"), "what it describes");
                None
            }
        }
    }

    fn all<T: for<'a> Deserialize<'a>>(&mut self, catalog: &Catalog, prefix: &str) -> BTreeMap<u32, T> {
        let mut all = BTreeMap::new();
        for (key, value) in catalog.scan(prefix) {
            let id = key.strip_prefix(prefix).and_then(|hex| u32::from_str_radix(hex, 16).ok());
            let Some(id) = id else {
                self.wrong(key, "there is no number in the key", "what it describes");
                continue;
            };
            if let Some(record) = self.parse(key, value) {
                all.insert(id, record);
            }
        }
        all
    }

    fn names(&mut self, volumes: &BTreeMap<u32, VolumeRecord>, nodes: &BTreeMap<u32, NodeRecord>) {
        let of_volumes = volumes.iter().map(|(id, v)| (format!("volume/{id:08x}"), v.name.clone(), v.uuid));
        let of_nodes = nodes.iter().filter_map(|(id, node)| {
            node.name.clone().map(|name| (format!("node/{id:08x}"), name, node.uuid))
        });
        let (mut by_name, mut by_uuid) = (HashMap::new(), HashMap::new());
        for (key, name, uuid) in of_volumes.chain(of_nodes) {
            if let Some(other) = by_name.insert(name.clone(), key.clone()) {
                self.wrong(
                    &key,
                    format!("its name '{name}' is that of `{other}` too"),
                    "one of them, by name",
                );
            }
            if let Some(other) = by_uuid.insert(uuid, key.clone()) {
                self.wrong(&key, format!("its UUID {uuid} is that of `{other}` too"), "one of them, by UUID");
            }
        }
    }

    fn heads(&mut self, volumes: &BTreeMap<u32, VolumeRecord>, nodes: &BTreeMap<u32, NodeRecord>) {
        let mut heads: HashMap<u32, u32> = HashMap::new();
        for (id, volume) in volumes {
            let key = format!("volume/{id:08x}");
            match nodes.get(&volume.head) {
                None => {
                    self.wrong(&key, format!("its head, node {}, is not there", volume.head), &volume.name)
                }
                Some(head) if head.deleting || head.sealed.is_some() => {
                    let why = format!("its head, node {}, is sealed or being deleted", volume.head);
                    self.wrong(&key, why, &volume.name);
                }
                Some(head) if head.volume != *id => {
                    self.wrong(&key, format!("its head says it is of volume {}", head.volume), &volume.name);
                }
                Some(head) if head.size != volume.size => {
                    self.wrong(
                        &key,
                        format!("it has {} bytes, its head {}", volume.size, head.size),
                        "nothing",
                    );
                }
                Some(_) => {}
            }
            if let Some(other) = heads.insert(volume.head, *id) {
                self.wrong(
                    &key,
                    format!("volume {other} has the same head, node {}", volume.head),
                    &volume.name,
                );
            }
        }
        for (id, node) in nodes {
            let key = format!("node/{id:08x}");
            if node.sealed.is_none() && !heads.contains_key(id) {
                self.wrong(&key, "it is a head, but no volume's", "what was written to it since its parent");
            }
            if node.sealed.is_some() && !node.deleting && node.name.is_none() {
                self.wrong(&key, "it is a snapshot without a name", "what it alone holds");
            }
        }
    }

    fn lineages(&mut self, nodes: &BTreeMap<u32, NodeRecord>) {
        for (id, node) in nodes {
            let Some(parent) = node.parent else { continue };
            let key = format!("node/{id:08x}");
            let cost = "what it shares with its parent";
            match nodes.get(&parent) {
                _ if parent >= *id => {
                    self.wrong(&key, format!("its parent, node {parent}, is not older"), cost)
                }
                None => self.wrong(&key, format!("its parent, node {parent}, is not there"), cost),
                Some(above) => match (above.sealed, node.sealed) {
                    (None, _) => {
                        self.wrong(&key, format!("its parent, node {parent}, still takes writes"), cost)
                    }
                    (Some(above), Some(own)) if above > own => {
                        self.wrong(
                            &key,
                            format!("its parent was sealed in epoch {above}, later than it ({own})"),
                            cost,
                        );
                    }
                    _ => {}
                },
            }
        }
    }

    fn numbers(
        &mut self,
        pool: &PoolRecord,
        volumes: &BTreeMap<u32, VolumeRecord>,
        nodes: &BTreeMap<u32, NodeRecord>,
    ) {
        let last = |keys: Option<(&u32, ())>| keys.map_or(0, |(id, ())| *id);
        let (volume, node) = (
            last(volumes.last_key_value().map(|(id, _)| (id, ()))),
            last(nodes.last_key_value().map(|(id, _)| (id, ()))),
        );
        if node >= pool.next_node || volume >= pool.next_volume {
            self.wrong(
                "pool",
                "a number that it would give next is taken already",
                "nothing, until something new is made",
            );
        }
        if let Some((id, node)) = nodes.iter().find(|(_, node)| node.sealed.is_some_and(|at| at > pool.epoch))
        {
            let why = format!("it was sealed in epoch {:?}, which has not come yet", node.sealed);
            self.wrong(&format!("node/{id:08x}"), why, "nothing");
        }
    }
}
