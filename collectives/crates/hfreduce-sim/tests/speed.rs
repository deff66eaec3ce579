//! Simulated performance, compared with the paper and with arithmetic.

use hfreduce_core::Determinism;
use hfreduce_engine::Priority;
use hfreduce_engine::endpoint::default_slots;
use hfreduce_plan::{NodePlace, Plan};
use hfreduce_sim::cluster::{Settings, allreduce};
use hfreduce_sim::figure7::{self, SIZE_BYTES, paper};
use hfreduce_sim::hardware::Hardware;
use hfreduce_sim::{SimError, ring};

#[test]
fn the_paper_s_figures_follow_from_hardware_constants() {
    for point in figure7::points(&[4, 16, 64], Settings::default()).unwrap() {
        let (low, high) = paper::HFREDUCE;
        assert!((low..=high * 1.03).contains(&point.hfreduce), "{point:?}");
        assert!((paper::NVLINK_OVER..=paper::NETWORK * 1.03).contains(&point.nvlink), "{point:?}");
        assert!((11.5..=12.5).contains(&point.network), "{point:?}");
        let (low, high) = paper::NCCL;
        assert!((low..=high * 1.03).contains(&point.nccl), "{point:?}");
        assert_eq!(point.binds.0, "root port", "as the paper found");
    }
}

#[test]
fn the_limits_are_those_of_the_paper() {
    let limit = Hardware::FIRE_FLYER_2.memory_limit() / 1e9;
    assert!((13.2..13.5).contains(&limit), "320 GB/s for 24 accesses: {limit}");
    let limit = Hardware::FIRE_FLYER_2.network_limit() / 1e9;
    assert!((12.0..12.5).contains(&limit), "{limit}");
    let limit = Hardware::FIRE_FLYER_2.root_port_limit() / 1e9;
    assert!((8.0..8.5).contains(&limit), "\"slightly over 8\": {limit}");
    assert!(Hardware::FIRE_FLYER_2_NVLINK.root_port_limit() > 16e9);
}

#[test]
fn the_network_alone_reaches_93_percent_of_its_limit_at_every_scale() {
    for nodes in [4, 9, 33, 200] {
        let plan = Plan::new(&figure7::places(nodes)).unwrap();
        let hardware = Hardware::FIRE_FLYER_2_NETWORK;
        let outcome = allreduce(&plan, &hardware, Settings::default(), &[SIZE_BYTES]).unwrap();
        let share = outcome.algorithm_rate(SIZE_BYTES) / hardware.network_limit();
        assert!((0.93..=1.001).contains(&share), "{nodes} nodes: {share}");
    }
}

/// Eight nodes in two zones at 1 Gb/s with one link between them.
#[test]
fn two_zones_over_one_link_reach_90_percent_and_cross_it_once_each_way() {
    let places: Vec<NodePlace> = (0..8)
        .map(|node| NodePlace::new(format!("n{node}"), if node < 4 { "a" } else { "b" }))
        .collect();
    let hardware = Hardware::ethernet(1e9);
    let settings = Settings { slot_bytes: 64 << 10, ..Settings::default() };
    let bytes = 16_u64 << 20;
    let limit = 2.0 * bytes as f64 / hardware.network_rate;
    let plan = Plan::new(&places).unwrap();
    let outcome = allreduce(&plan, &hardware, settings, &[bytes]).unwrap();
    let share = limit / outcome.seconds;
    assert!(share >= 0.90, "{share} of 2S/B");
    assert_eq!(outcome.zone_bytes.len(), 2);
    for (from, to, crossed) in &outcome.zone_bytes {
        let share = crossed / bytes as f64;
        assert!((0.99..=1.01).contains(&share), "{from} to {to}: {share} of S");
    }
}

#[test]
fn the_default_slots_cost_no_speed() {
    for nodes in [2, 4, 16, 64] {
        let plan = Plan::new(&figure7::places(nodes)).unwrap();
        let rate = |slots| {
            let settings = Settings { slots, ..Settings::default() };
            let done = allreduce(&plan, &Hardware::FIRE_FLYER_2, settings, &[SIZE_BYTES]).unwrap();
            done.algorithm_rate(SIZE_BYTES)
        };
        let slot_bytes = Settings::default().slot_bytes;
        let few = default_slots(nodes, 1, slot_bytes, Priority::default());
        let (few, many) = (rate(few), rate(64));
        assert!(few > 0.99 * many, "{nodes} nodes: {few} with the default, {many} with 64");
    }
}

/// A tree's inner nodes transfer the values of two children and a parent: three times the vector each way, not
/// two. Wide sums of 16-bit elements are twice as long on their way up, not down.
#[test]
fn the_cost_of_the_modes_is_their_network_traffic() {
    let share = |nodes: usize, hardware: &Hardware, modes: Determinism| {
        let plan = Plan::new(&figure7::places(nodes)).unwrap();
        let rate = |modes| {
            let settings = Settings { modes, ..Settings::default() };
            allreduce(&plan, hardware, settings, &[SIZE_BYTES]).unwrap().algorithm_rate(SIZE_BYTES)
        };
        rate(modes) / rate(Determinism::DEFAULT)
    };
    let stable = Determinism { stable: true, wide: false };
    let wide = Determinism { stable: false, wide: true };
    for nodes in [2, 9, 33] {
        let network = share(nodes, &Hardware::FIRE_FLYER_2_NETWORK, stable);
        let least = if nodes == 2 { 0.95 } else { 0.62 };
        assert!((least..=1.01).contains(&network), "stable, {nodes} nodes: {network}");
        let machine = share(nodes, &Hardware::FIRE_FLYER_2, stable);
        assert!(machine > 0.85, "stable, {nodes} nodes of the paper: {machine}");
        let longer = share(nodes, &Hardware::FIRE_FLYER_2_NETWORK, wide);
        assert!((0.6..=0.75).contains(&longer), "wide, {nodes} nodes: {longer}");
        println!("{nodes} nodes: stable {network:.2} ({machine:.2} the paper's), wide {longer:.2}");
    }
}

#[test]
fn the_rate_of_the_ring_falls_with_its_length() {
    let rate = |nodes| {
        SIZE_BYTES as f64 / ring::allreduce_seconds(&Hardware::FIRE_FLYER_2, nodes, SIZE_BYTES)
    };
    assert!(rate(4) > 4.5e9 && rate(256) < 2.4e9, "{} {}", rate(4), rate(256));
}

#[test]
fn runs_are_deterministic_and_small_windows_complete() {
    let plan = Plan::new(&figure7::places(5)).unwrap();
    let run = |sizes: &[u64]| allreduce(&plan, &Hardware::FIRE_FLYER_2, Settings::default(), sizes);
    let sizes = [4 << 20, 0, 4, 100_000];
    let (first, second) = (run(&sizes).unwrap(), run(&sizes).unwrap());
    assert_eq!((first.seconds, first.events), (second.seconds, second.events));
    assert_eq!(run(&[]).unwrap_err(), SimError::Empty);
    let alone = Plan::new(&figure7::places(1)).unwrap();
    assert!(allreduce(&alone, &Hardware::FIRE_FLYER_2, Settings::default(), &[1 << 20]).is_ok());
    // The smallest windows still complete: the core gives the last credit to the oldest chunk.
    let tight = Settings { window: 1, slots: 2, depth: 1, ..Settings::default() };
    assert!(allreduce(&plan, &Hardware::FIRE_FLYER_2, tight, &[4 << 20]).is_ok());
}

#[test]
fn the_chart_and_the_json_contain_every_point() {
    let points = figure7::points(&[4, 8], Settings::default()).unwrap();
    let svg = figure7::picture(&points);
    assert_eq!(svg.matches("<circle").count(), 2 * 5);
    for word in ["32", "64", "paper: HFReduce 6.3–8.1", "NCCL's ring", "with NVLink"] {
        assert!(svg.contains(word), "{word}");
    }
    let json = figure7::json(&points, Settings::default());
    assert_eq!(json["points"][1]["gpus"], 64);
    assert_eq!(json["hardware"]["root_port_rate"], 37.5e9);
    assert!(figure7::table(&points).lines().count() == 4);
}
