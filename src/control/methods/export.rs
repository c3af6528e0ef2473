//! `volume_export` and `volume_unexport`: subsystem, namespace and listener in one step.
#![forbid(unsafe_code)]

use super::nvmf::target_error;
use crate::control::Daemon;
use crate::control::error::RpcError;
use crate::control::exports::{Addition, ChangeError, Record};
use crate::control::lookup::Found;
use crate::control::schema::Params;
use crate::nvme::nqn::{DISCOVERY, NQN_LEN_MAX};
use crate::target::{SubsystemSpec, TargetError};
use serde_json::{Value, json};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;

/// Exports a volume or snapshot.
pub async fn export(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    let listen = match params.text_opt("listen")? {
        Some(text) => match text.parse::<SocketAddr>() {
            Ok(address) if address.port() > 0 => address,
            _ => {
                return Err(RpcError::field(
                    "listen",
                    "must be ADDR:PORT, such as 0.0.0.0:4420 or [::1]:4420",
                ));
            }
        },
        None => daemon.listen,
    };
    let mut hosts = params.texts("hosts")?;
    hosts.sort_unstable();
    hosts.dedup();
    let read_only = params.bool_opt("read_only")?;
    if params.text_opt("nqn")?.is_some_and(|nqn| nqn == DISCOVERY) {
        return Err(refusal(TargetError::ReservedNqn.into()));
    }
    let _changing = daemon.exports.lock().await;
    let found = daemon.node("name", params.text("name")?).await?;
    let nqn = match params.text_opt("nqn")? {
        Some(nqn) => nqn.to_owned(),
        None => match daemon.exports.of_node(found.node.uuid).first() {
            Some((nqn, _)) => nqn.clone(),
            None => derived_nqn(&found),
        },
    };
    let listen = match daemon.exports.get(&nqn) {
        Some(record) => {
            check_same(&record, &found, &hosts, read_only)?;
            match params.has("listen") || record.listeners.is_empty() {
                true => vec![listen],
                false => record.listeners,
            }
        }
        None => {
            build(daemon, &found, &nqn, &hosts, listen, read_only.unwrap_or(false)).await.map_err(refusal)?;
            vec![listen]
        }
    };
    for address in listen {
        // Also where the address is recorded already, but could not be opened so far.
        match daemon.add_listener(&nqn, address).await {
            Ok(()) | Err(ChangeError::Target(TargetError::ListenerExists { .. })) => {}
            Err(error) => return Err(refusal(error)),
        }
    }
    let record = daemon.exports.get(&nqn);
    let record = record.ok_or_else(|| RpcError::refused(libc::ENODEV, "the export is gone again"))?;
    Ok(answer(&found, &record))
}

async fn build(
    daemon: &Daemon,
    found: &Found,
    nqn: &str,
    hosts: &[String],
    listen: SocketAddr,
    read_only: bool,
) -> Result<(), ChangeError> {
    let mut spec = SubsystemSpec::new(nqn);
    spec.allow_any_host = hosts.is_empty();
    daemon.create_subsystem(spec)?;
    let filled = fill(daemon, found, nqn, hosts, listen, read_only).await;
    if filled.is_err() {
        // What this call made goes away again. Nothing listened yet, so nobody has to leave.
        drop(daemon.delete_subsystem(nqn).await?);
    }
    filled
}

async fn fill(
    daemon: &Daemon,
    found: &Found,
    nqn: &str,
    hosts: &[String],
    listen: SocketAddr,
    read_only: bool,
) -> Result<(), ChangeError> {
    for host in hosts {
        daemon.add_host(nqn, host).await?;
    }
    let addition = Addition { read_only, ..daemon.node_backend(found).await? };
    // Before the namespace, whose record is the first that a kill leaves: the export is then whole or absent.
    let mut record = daemon.record(nqn)?;
    record.listeners.push(listen);
    daemon.keep(record).await?;
    daemon.add_namespace(nqn, addition).await?;
    // Last, so that no host finds a subsystem without its namespace.
    daemon.add_listener(nqn, listen).await
}

/// Whether an existing subsystem is the export that is asked for.
fn check_same(
    record: &Record,
    found: &Found,
    hosts: &[String],
    read_only: Option<bool>,
) -> Result<(), RpcError> {
    let nqn = &record.nqn;
    let shown = record.namespaces.iter().find(|namespace| namespace.place.is_node(found.node.uuid));
    let Some(shown) = shown else {
        return Err(RpcError::refused(
            libc::EEXIST,
            format!("subsystem {nqn} exists already and shows something else"),
        )
        .with("field", "nqn")
        .hint("add to it with `rimrock rpc nvmf_subsystem_add_ns`, or choose another NQN"));
    };
    if read_only.is_some_and(|read_only| read_only != shown.read_only) {
        let how = if shown.read_only { "read-only" } else { "to be written" };
        return Err(RpcError::refused(
            libc::EEXIST,
            format!("{} is exported already as {nqn}, {how}", found.node.name),
        )
        .with("field", "read_only")
        .hint("unexport it first, or choose another NQN"));
    }
    let mut allowed = record.hosts.clone();
    allowed.sort_unstable();
    if !hosts.is_empty() && (hosts != allowed || record.allow_any_host) {
        return Err(RpcError::refused(
            libc::EEXIST,
            format!("{} is exported already, to other hosts", found.node.name),
        )
        .with("field", "hosts")
        .hint(
            "change the list with `rimrock rpc nvmf_subsystem_add_host` and `nvmf_subsystem_remove_host`",
        ));
    }
    Ok(())
}

fn answer(found: &Found, record: &Record) -> Value {
    let nsid = record.namespaces.iter().find(|namespace| namespace.place.is_node(found.node.uuid));
    let connect: Vec<String> =
        record.listeners.iter().flat_map(|listen| connect_lines(*listen, &record.nqn)).collect();
    json!({
        "name": found.node.name,
        "pool": found.pool.name(),
        "nqn": record.nqn,
        "nsid": nsid.map(|namespace| namespace.nsid),
        "listen": record.listeners.iter().map(SocketAddr::to_string).collect::<Vec<String>>(),
        "connect": connect,
    })
}

/// The command lines that connect a Linux host; for a wildcard address one per address of this machine.
fn connect_lines(listen: SocketAddr, nqn: &str) -> Vec<String> {
    let addresses = match listen.ip().is_unspecified() {
        true => own_addresses(listen.is_ipv6()),
        false => vec![listen.ip()],
    };
    let line = |address: IpAddr| format!("nvme connect -t tcp -a {address} -s {} -n {nqn}", listen.port());
    addresses.into_iter().map(line).collect()
}

/// This machine's addresses that others can reach, or loopback when there is none.
fn own_addresses(with_ipv6: bool) -> Vec<IpAddr> {
    let mut addresses = Vec::new();
    for interface in nix::ifaddrs::getifaddrs().into_iter().flatten() {
        let Some(address) = interface.address else { continue };
        if let Some(v4) = address.as_sockaddr_in() {
            addresses.push(IpAddr::V4(v4.ip()));
        } else if let Some(v6) = address.as_sockaddr_in6().filter(|_| with_ipv6) {
            // Link-local addresses need a scope that only the host knows.
            if !v6.ip().is_unicast_link_local() {
                addresses.push(IpAddr::V6(v6.ip()));
            }
        }
    }
    addresses.retain(|address| !address.is_loopback());
    addresses.dedup();
    if addresses.is_empty() {
        addresses.push(IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
    addresses
}

/// The NQN of an export that was given none: readable where it fits, else made from the UUID.
fn derived_nqn(found: &Found) -> String {
    let readable = format!("nqn.2026-01.io.rimrock:{}:{}", found.pool.name(), found.node.name);
    match readable.len() <= NQN_LEN_MAX {
        true => readable,
        false => format!("nqn.2014-08.org.nvmexpress:uuid:{}", found.node.uuid),
    }
}

fn refusal(error: ChangeError) -> RpcError {
    match error {
        ChangeError::Target(error) => target_error(&error),
        ChangeError::Refused(error) => error,
    }
}

/// Ends every export of a volume or snapshot.
pub async fn unexport(daemon: &Rc<Daemon>, name: &str) -> Result<Value, RpcError> {
    let changing = daemon.exports.lock().await;
    let found = daemon.node("name", name).await?;
    let exports = daemon.exports.of_node(found.node.uuid);
    if exports.is_empty() {
        return Err(RpcError::refused(libc::ENOENT, format!("{} is not exported", found.node.name)));
    }
    let (mut nqns, mut leaving) = (Vec::new(), Vec::new());
    for (nqn, nsid) in exports {
        let alone = daemon.exports.get(&nqn).is_some_and(|record| record.namespaces.len() == 1);
        leaving.push(match alone {
            true => daemon.delete_subsystem(&nqn).await.map_err(refusal)?,
            false => daemon.remove_namespace(&nqn, nsid).await.map_err(refusal)?,
        });
        nqns.push(nqn);
    }
    drop(changing);
    for leaving in leaving {
        leaving.end().await.map_err(refusal)?;
    }
    nqns.dedup();
    Ok(json!(nqns))
}
