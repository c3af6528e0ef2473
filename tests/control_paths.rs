//! Access states, referrals and the addresses of discovery: what the operator sets, what is refused, and what comes back.
#![forbid(unsafe_code)]

mod daemon;

use daemon::{Daemon, free_port};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::net::TcpStream;

const NQN: &str = "nqn.2014-08.org.example:paths";
const DISCOVERY: &str = "nqn.2014-08.org.nvmexpress.discovery";

fn address(port: u16) -> Value {
    json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port.to_string() })
}

/// A subsystem that reports access states, with volume `v` as namespace 1 of group 3.
fn configured() -> Daemon {
    let (daemon, _) = Daemon::configured();
    daemon.call("volume_create", json!({ "name": "v", "size": 64 << 20 }));
    let subsystem = json!({ "nqn": NQN, "allow_any_host": true, "ana_reporting": true, "max_namespaces": 4 });
    daemon.call("nvmf_create_subsystem", subsystem);
    let namespace = json!({ "nqn": NQN, "namespace": { "bdev_name": "main/v", "anagrpid": 3 } });
    assert_eq!(daemon.call("nvmf_subsystem_add_ns", namespace), 1);
    daemon
}

fn set(port: u16, state: &str, group: Option<u32>) -> Value {
    let mut params = json!({ "nqn": NQN, "listen_address": address(port), "ana_state": state });
    if let Some(group) = group {
        params["anagrpid"] = json!(group);
    }
    params
}

/// The states of each listener, by port, groups 1 to 4.
fn states(daemon: &Daemon) -> Vec<(String, Vec<String>)> {
    let listeners = daemon.call("nvmf_subsystem_get_listeners", json!({ "nqn": NQN }));
    let view = listeners.as_array().unwrap().iter().map(|listener| {
        let states = listener["ana_states"].as_array().unwrap().iter().zip(1..).map(|(state, group)| {
            assert_eq!(state["ana_group"], group);
            state["ana_state"].as_str().unwrap().to_owned()
        });
        (listener["address"]["trsvcid"].as_str().unwrap().to_owned(), states.collect())
    });
    view.collect()
}

#[test]
fn how_each_address_reaches_what_is_there_comes_back_after_a_kill() {
    let mut daemon = configured();
    let (a, b) = (free_port(), free_port());
    daemon.call("nvmf_subsystem_add_listener", json!({ "nqn": NQN, "listen_address": address(a) }));
    daemon.call(
        "nvmf_subsystem_add_listener",
        json!({ "nqn": NQN, "listen_address": address(b), "ana_state": "non_optimized" }),
    );
    assert_eq!(daemon.call("nvmf_subsystem_listener_set_ana_state", set(a, "inaccessible", Some(3))), true);
    assert_eq!(
        daemon.call("nvmf_subsystem_listener_set_ana_state", set(b, "persistent_loss", Some(1))),
        true
    );
    let expected = [
        (a.to_string(), ["optimized", "optimized", "inaccessible", "optimized"].map(str::to_owned).to_vec()),
        (
            b.to_string(),
            ["persistent_loss", "non_optimized", "non_optimized", "non_optimized"]
                .map(str::to_owned)
                .to_vec(),
        ),
    ];
    assert_eq!(states(&daemon), expected);
    daemon.signal(Signal::SIGKILL);
    daemon.restart();
    assert_eq!(states(&daemon), expected, "{}", daemon.log());
    let subsystem = daemon.call("nvmf_get_subsystems", json!({ "nqn": NQN }));
    assert_eq!(subsystem[0]["namespaces"][0]["anagrpid"], 3);
    // Of all groups, and what is refused changes nothing.
    daemon.call("nvmf_subsystem_listener_set_ana_state", set(a, "change", None));
    daemon.call("nvmf_subsystem_listener_set_ana_state", set(a, "optimized", Some(0)));
    for (params, field) in [
        (set(a, "inaccessible", Some(5)), "anagrpid"),
        (set(free_port(), "inaccessible", None), "listen_address"),
        (set(a, "gone", None), "ana_state"),
    ] {
        let error = daemon.refused("nvmf_subsystem_listener_set_ana_state", params);
        assert_eq!(error["data"]["field"], field, "{error}");
    }
    daemon.refused(
        "nvmf_subsystem_listener_set_ana_state",
        json!({ "nqn": daemon::SCRATCH, "listen_address": address(a), "ana_state": "optimized" }),
    );
    // An address that goes takes its states with it.
    daemon.call("nvmf_subsystem_remove_listener", json!({ "nqn": NQN, "listen_address": address(b) }));
    daemon.call("nvmf_subsystem_add_listener", json!({ "nqn": NQN, "listen_address": address(b) }));
    let usual = vec!["optimized".to_owned(); 4];
    let expected = [(a.to_string(), usual.clone()), (b.to_string(), usual)];
    assert_eq!(states(&daemon), expected);
    daemon.signal(Signal::SIGTERM);
    daemon.restart();
    assert_eq!(states(&daemon), expected);
}

#[test]
fn referrals_and_the_addresses_of_discovery_come_back() {
    let mut daemon = configured();
    let (here, there) = (free_port(), free_port());
    let referral = |port| json!({ "address": address(port) });
    daemon.call("nvmf_discovery_add_referral", referral(there));
    daemon.call("nvmf_discovery_add_referral", referral(there));
    let secure = json!({ "address": address(9), "subnqn": NQN, "secure_channel": true });
    daemon.call("nvmf_discovery_add_referral", secure);
    daemon.call("nvmf_subsystem_add_listener", json!({ "nqn": DISCOVERY, "listen_address": address(here) }));
    let expected = json!([
        { "address": address(there), "secure_channel": false, "subnqn": DISCOVERY },
        { "address": address(9), "secure_channel": true, "subnqn": NQN },
    ]);
    assert_eq!(daemon.call("nvmf_discovery_get_referrals", Value::Null), expected);
    daemon.signal(Signal::SIGKILL);
    daemon.restart();
    assert_eq!(daemon.call("nvmf_discovery_get_referrals", Value::Null), expected, "{}", daemon.log());
    TcpStream::connect(("127.0.0.1", here)).expect("discovery listens again");
    let discovery = daemon.call("nvmf_subsystem_get_listeners", json!({ "nqn": DISCOVERY }));
    assert_eq!(discovery, json!([{ "address": address(here) }]));
    // What is taken away stays away.
    let error = daemon.refused("nvmf_discovery_remove_referral", referral(9));
    assert_eq!((&error["code"], &error["data"]["field"]), (&json!(-32603), &json!("address")), "{error}");
    daemon.call("nvmf_discovery_remove_referral", referral(there));
    daemon.call("nvmf_discovery_remove_referral", json!({ "address": address(9), "subnqn": NQN }));
    daemon
        .call("nvmf_subsystem_remove_listener", json!({ "nqn": DISCOVERY, "listen_address": address(here) }));
    daemon.signal(Signal::SIGKILL);
    daemon.restart();
    assert_eq!(daemon.call("nvmf_discovery_get_referrals", Value::Null), json!([]));
    assert!(TcpStream::connect(("127.0.0.1", here)).is_err());
}
