//! Line charts as SVG, without a library: panels side by side that share their axes.

use std::fmt::Write;

/// A reference range: a band of the y axis over all x.
#[derive(Debug, Clone)]
pub struct Band {
    /// Label, written into the band.
    pub name: String,
    /// `#rrggbb`.
    pub colour: &'static str,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// A line with one value for every tick.
#[derive(Debug, Clone)]
pub struct Line {
    /// Label, written at its right end.
    pub name: String,
    /// `#rrggbb`.
    pub colour: &'static str,
    /// One value for each tick.
    pub values: Vec<f64>,
}

/// One plot.
#[derive(Debug, Clone)]
pub struct Panel {
    /// Title, above the plot.
    pub title: String,
    /// Bands behind the lines.
    pub bands: Vec<Band>,
    /// The lines.
    pub lines: Vec<Line>,
}

/// A chart of several panels.
#[derive(Debug, Clone)]
pub struct Chart {
    /// Heading.
    pub title: String,
    /// Explanation under the heading.
    pub subtitle: String,
    /// Label of the x axis.
    pub x_name: String,
    /// Label of the y axis.
    pub y_name: String,
    /// Names of the points along the x axis, evenly spaced.
    pub ticks: Vec<String>,
    /// Upper end of the y axis, which starts at 0.
    pub y_max: f64,
    /// The plots.
    pub panels: Vec<Panel>,
}

const PLOT_WIDTH: f64 = 400.0;
const PLOT_HEIGHT: f64 = 300.0;
const LEFT: f64 = 62.0;
/// Space for line names, to the right of each plot.
const NAMES: f64 = 138.0;
const TOP: f64 = 112.0;
const BOTTOM: f64 = 62.0;
/// Minimum vertical distance of line names.
const NAME_HEIGHT: f64 = 16.0;
const INK: &str = "#1a202c";
const FAINT: &str = "#4a5568";

impl Chart {
    /// The chart as an SVG document.
    pub fn svg(&self) -> String {
        let panel_width = LEFT + PLOT_WIDTH + NAMES;
        let width = panel_width * self.panels.len() as f64;
        let height = TOP + PLOT_HEIGHT + BOTTOM;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
             height=\"{height}\" font-family=\"Helvetica, Arial, sans-serif\" font-size=\"13\" role=\"img\" \
             aria-label=\"{}\">\n<rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n",
            escape(&self.title)
        );
        text(
            &mut svg,
            (24.0, 34.0),
            "start",
            INK,
            &self.title,
            "font-size=\"20\" font-weight=\"bold\"",
        );
        text(&mut svg, (24.0, 56.0), "start", FAINT, &self.subtitle, "");
        for (at, panel) in self.panels.iter().enumerate() {
            self.panel(&mut svg, panel_width * at as f64 + LEFT, panel);
        }
        svg + "</svg>\n"
    }

    fn x(&self, at: usize) -> f64 {
        let room = PLOT_WIDTH - 40.0;
        20.0 + room * at as f64 / (self.ticks.len().max(2) - 1) as f64
    }

    fn y(&self, value: f64) -> f64 {
        TOP + PLOT_HEIGHT * (1.0 - value.clamp(0.0, self.y_max) / self.y_max)
    }

    fn panel(&self, svg: &mut String, left: f64, panel: &Panel) {
        text(
            svg,
            (left, TOP - 18.0),
            "start",
            INK,
            &panel.title,
            "font-size=\"15\" font-weight=\"bold\"",
        );
        for band in &panel.bands {
            let (top, bottom) = (self.y(band.high), self.y(band.low));
            let _ = writeln!(
                svg,
                "<rect x=\"{left}\" y=\"{top:.1}\" width=\"{PLOT_WIDTH}\" height=\"{:.1}\" fill=\"{}\" \
                 fill-opacity=\"0.14\"/>",
                bottom - top,
                band.colour
            );
        }
        let step = 2.0;
        let mut value = 0.0;
        while value <= self.y_max {
            let y = self.y(value);
            let _ = writeln!(
                svg,
                "<line x1=\"{left}\" y1=\"{y:.1}\" x2=\"{:.1}\" y2=\"{y:.1}\" stroke=\"{}\" stroke-width=\"1\"/>",
                left + PLOT_WIDTH,
                if value == 0.0 { FAINT } else { "#e2e8f0" }
            );
            text(svg, (left - 8.0, y + 4.5), "end", FAINT, &format!("{value}"), "");
            value += step;
        }
        text(svg, (left - 8.0, TOP - 18.0), "end", FAINT, &self.y_name, "");
        for (at, tick) in self.ticks.iter().enumerate() {
            let at = (left + self.x(at), TOP + PLOT_HEIGHT + 20.0);
            text(svg, at, "middle", FAINT, tick, "font-size=\"12\"");
        }
        let under = (left + PLOT_WIDTH / 2.0, TOP + PLOT_HEIGHT + 44.0);
        text(svg, under, "middle", FAINT, &self.x_name, "");
        for line in &panel.lines {
            self.line(svg, left, line);
        }
        self.names(svg, left, panel);
        for band in &panel.bands {
            // Into the corner of the band farther from the lines' first values.
            let over = panel.lines.iter().filter_map(|line| line.values.first());
            let near_top = over
                .filter(|value| **value <= band.high && **value > band.low)
                .any(|value| self.y(*value) - self.y(band.high) < NAME_HEIGHT + 6.0);
            let y = if near_top { self.y(band.low) - 7.0 } else { self.y(band.high) + 16.0 };
            text(
                svg,
                (left + 8.0, y),
                "start",
                band.colour,
                &band.name,
                "font-size=\"12\" font-style=\"italic\"",
            );
        }
    }

    fn line(&self, svg: &mut String, left: f64, line: &Line) {
        let points: Vec<(f64, f64)> = line
            .values
            .iter()
            .enumerate()
            .map(|(at, value)| (left + self.x(at), self.y(*value)))
            .collect();
        let path: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2.5\" stroke-linejoin=\"round\"/>",
            path.join(" "),
            line.colour
        );
        for ((x, y), value) in points.iter().zip(&line.values) {
            let _ = writeln!(
                svg,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{}\" stroke=\"#ffffff\" stroke-width=\"1.2\">\
                 <title>{}: {value:.2}</title></circle>",
                line.colour,
                escape(&line.name)
            );
        }
    }

    /// Writes each name next to the end of its line, with its last value; names of lines that end close
    /// together are moved apart.
    fn names(&self, svg: &mut String, left: f64, panel: &Panel) {
        let mut names: Vec<(f64, &Line, f64)> = panel
            .lines
            .iter()
            .filter_map(|line| line.values.last().map(|value| (self.y(*value) + 4.5, line, *value)))
            .collect();
        names.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut lowest = f64::MIN;
        for (y, line, value) in names {
            let y = y.max(lowest + 2.0 * NAME_HEIGHT + 2.0);
            lowest = y;
            let x = left + PLOT_WIDTH + 8.0;
            text(svg, (x, y), "start", line.colour, &line.name, "font-weight=\"bold\"");
            text(
                svg,
                (x, y + NAME_HEIGHT),
                "start",
                line.colour,
                &format!("{value:.1}"),
                "font-size=\"12\"",
            );
        }
    }
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, colour: &str, words: &str, more: &str) {
    let _ = writeln!(
        svg,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"{colour}\" {more}>{}</text>",
        escape(words)
    );
}

fn escape(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_escaped_and_every_value_is_a_point() {
        let svg = Chart {
            title: "a < b & \"c\"".into(),
            subtitle: String::new(),
            x_name: "x".into(),
            y_name: "y".into(),
            ticks: vec!["1".into(), "2".into()],
            y_max: 10.0,
            panels: vec![Panel {
                title: "p".into(),
                bands: vec![Band { name: "b".into(), colour: "#111111", low: 1.0, high: 2.0 }],
                lines: vec![Line { name: "l".into(), colour: "#222222", values: vec![1.0, 99.0] }],
            }],
        }
        .svg();
        assert!(svg.contains("a &lt; b &amp; &quot;c&quot;") && !svg.contains("a < b"));
        assert_eq!(svg.matches("<circle").count(), 2);
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
    }
}
