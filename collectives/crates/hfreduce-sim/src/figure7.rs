//! Reproduction of the paper's Figure 7: allreduce of 186 MiB over a growing number of nodes by HFReduce, by
//! HFReduce with NVLink pairs, by NCCL's ring, and with the network as the only limit.

use hfreduce_plan::{NodePlace, Plan};
use serde::Serialize;

use crate::SimError;
use crate::chart::{Band, Chart, Line, Panel};
use crate::cluster::{Settings, allreduce};
use crate::hardware::Hardware;
use crate::ring;

/// The size of the paper's measurement (IV-B2).
pub const SIZE_BYTES: u64 = 186 << 20;
/// Default numbers of nodes. Two nodes are omitted: they send each byte only once, so the network is not the
/// limit.
pub const NODES: [usize; 7] = [4, 8, 16, 32, 64, 128, 256];
/// Maximum number of nodes in one zone (paper III-B: about 600).
pub const ZONE_NODES_MAX: usize = 600;

/// Values from the text of the paper, in GB/s: (lowest, highest).
pub mod paper {
    /// HFReduce (IV-B2).
    pub const HFREDUCE: (f64, f64) = (6.3, 8.1);
    /// NCCL (IV-B2).
    pub const NCCL: (f64, f64) = (1.6, 4.8);
    /// HFReduce with NVLink (IV-C): "exceeding 10 GB/s".
    pub const NVLINK_OVER: f64 = 10.0;
    /// The realistic limit of the network (IV-D3).
    pub const NETWORK: f64 = 12.0;
}

/// One number of nodes. Rates in GB/s of gradient: size over time.
#[derive(Debug, Clone, Serialize)]
pub struct Point {
    /// Nodes.
    pub nodes: usize,
    /// Accelerators.
    pub gpus: usize,
    /// HFReduce.
    pub hfreduce: f64,
    /// HFReduce with NVLink pairs.
    pub nvlink: f64,
    /// The trees with the network as the only limit.
    pub network: f64,
    /// NCCL's ring.
    pub nccl: f64,
    /// The busiest resource for HFReduce, and its share of busy time.
    pub binds: (&'static str, f64),
}

/// Simulates all points.
///
/// # Errors
/// See [`SimError`]; a list that contains zero nodes has no plan.
pub fn points(nodes: &[usize], settings: Settings) -> Result<Vec<Point>, SimError> {
    nodes.iter().map(|nodes| point(*nodes, settings)).collect()
}

/// Nodes zone by zone, with as many zones as needed.
pub fn places(nodes: usize) -> Vec<NodePlace> {
    let zones = nodes.div_ceil(ZONE_NODES_MAX).max(1);
    let per_zone = nodes.div_ceil(zones).max(1);
    (0..nodes)
        .map(|node| NodePlace::new(format!("n{node:04}"), format!("zone-{}", node / per_zone)))
        .collect()
}

fn point(nodes: usize, settings: Settings) -> Result<Point, SimError> {
    let plan = Plan::new(&places(nodes))?;
    let run = |hardware: &Hardware| allreduce(&plan, hardware, settings, &[SIZE_BYTES]);
    let hfreduce = run(&Hardware::FIRE_FLYER_2)?;
    let rate = |outcome: &crate::cluster::Outcome| outcome.algorithm_rate(SIZE_BYTES) / 1e9;
    let per_node = Hardware::FIRE_FLYER_2.accelerators_per_node;
    Ok(Point {
        nodes,
        gpus: nodes * per_node,
        hfreduce: rate(&hfreduce),
        nvlink: rate(&run(&Hardware::FIRE_FLYER_2_NVLINK)?),
        network: rate(&run(&Hardware::FIRE_FLYER_2_NETWORK)?),
        nccl: SIZE_BYTES as f64
            / ring::allreduce_seconds(&Hardware::FIRE_FLYER_2, nodes, SIZE_BYTES)
            / 1e9,
        binds: hfreduce.busiest.first().copied().unwrap_or(("nothing", 0.0)),
    })
}

/// The points as JSON, with the constants that they are computed from.
pub fn json(points: &[Point], settings: Settings) -> serde_json::Value {
    serde_json::json!({
        "version": 1,
        "unit": "GB/s, size over time",
        "size_bytes": SIZE_BYTES,
        "hardware": Hardware::FIRE_FLYER_2,
        "engine": settings,
        "paper": {
            "hfreduce": paper::HFREDUCE,
            "nccl": paper::NCCL,
            "nvlink_over": paper::NVLINK_OVER,
            "network": paper::NETWORK,
        },
        "points": points,
    })
}

/// The points as a table.
pub fn table(points: &[Point]) -> String {
    let mut text = String::from(
        "  nodes    GPUs   HFReduce  + NVLink   NCCL ring   network alone   binds HFReduce\n",
    );
    for point in points {
        text += &format!(
            "{:>7} {:>7} {:>10.2} {:>9.2} {:>11.2} {:>15.2}   {} ({:.0} %)\n",
            point.nodes,
            point.gpus,
            point.hfreduce,
            point.nvlink,
            point.nccl,
            point.network,
            point.binds.0,
            point.binds.1 * 100.0
        );
    }
    text + "GB/s of gradient, 186 MiB; the paper: HFReduce 6.3-8.1, with NVLink over 10, NCCL 1.6-4.8\n"
}

/// The points as an SVG document.
pub fn picture(points: &[Point]) -> String {
    let ticks: Vec<String> = points.iter().map(|point| point.gpus.to_string()).collect();
    let line = |name: &str, colour: &'static str, value: fn(&Point) -> f64| Line {
        name: name.into(),
        colour,
        values: points.iter().map(value).collect(),
    };
    let band = |name: &str, colour: &'static str, (low, high): (f64, f64)| Band {
        name: name.into(),
        colour,
        low,
        high,
    };
    const BLUE: &str = "#2b6cb0";
    const ORANGE: &str = "#c05621";
    const GREEN: &str = "#2f855a";
    const GREY: &str = "#718096";
    Chart {
        title: "Allreduce of 186 MiB on the paper's nodes".into(),
        subtitle:
            "Lines: simulated from constants of the hardware. Shaded: ranges from the paper's text."
                .into(),
        x_name: "GPUs".into(),
        y_name: "GB/s".into(),
        ticks,
        y_max: 14.0,
        panels: vec![
            Panel {
                title: "(a) HFReduce and NCCL".into(),
                bands: vec![
                    band("paper: HFReduce 6.3–8.1", BLUE, paper::HFREDUCE),
                    band("paper: NCCL 1.6–4.8", ORANGE, paper::NCCL),
                ],
                lines: vec![
                    line("HFReduce", BLUE, |point| point.hfreduce),
                    line("NCCL's ring", ORANGE, |point| point.nccl),
                ],
            },
            Panel {
                title: "(b) HFReduce with NVLink pairs".into(),
                bands: vec![band(
                    "paper: over 10, at most about 12",
                    GREEN,
                    (paper::NVLINK_OVER, paper::NETWORK),
                )],
                lines: vec![
                    line("with NVLink", GREEN, |point| point.nvlink),
                    line("HFReduce", BLUE, |point| point.hfreduce),
                    line("the network alone", GREY, |point| point.network),
                ],
            },
        ],
    }
    .svg()
}
