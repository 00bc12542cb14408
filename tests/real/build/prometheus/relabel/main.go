// Command relabel answers what Prometheus makes of label sets: a JSON object a line on standard input, an answer a line.
//
// A question has "configs" (metric_relabel_configs as YAML), "scheme" ("utf8" or "legacy") and "labels" (a list of label
// sets). The answer has "error", or "results": for each label set the new one, or null if the rules drop it. A question
// with "texts" is answered with each of them in lower and in upper case.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/relabel"
	"go.yaml.in/yaml/v2"
)

type question struct {
	Configs string              `json:"configs"`
	Scheme  string              `json:"scheme"`
	Labels  []map[string]string `json:"labels"`
	Texts   []string            `json:"texts"`
}

type answer struct {
	Error   string              `json:"error,omitempty"`
	Results []map[string]string `json:"results"`
	Cases   [][2]string         `json:"cases,omitempty"`
}

// load reads the rules as the configuration of a scrape does.
func load(text, scheme string) ([]*relabel.Config, error) {
	var configs []*relabel.Config
	if err := yaml.UnmarshalStrict([]byte(text), &configs); err != nil {
		return nil, err
	}
	names := model.UTF8Validation
	if scheme == "legacy" {
		names = model.LegacyValidation
	}
	for _, config := range configs {
		if config == nil {
			return nil, errors.New("empty or null metric relabeling rule in scrape config")
		}
		if err := config.Validate(names); err != nil {
			return nil, err
		}
	}
	return configs, nil
}

func answered(asked question) answer {
	var given answer
	configs, err := load(asked.Configs, asked.Scheme)
	if err != nil {
		given.Error = err.Error()
	} else {
		for _, set := range asked.Labels {
			builder := labels.NewBuilder(labels.FromMap(set))
			var result map[string]string
			if relabel.ProcessBuilder(builder, configs...) {
				result = builder.Labels().Map()
			}
			given.Results = append(given.Results, result)
		}
	}
	for _, text := range asked.Texts {
		given.Cases = append(given.Cases, [2]string{strings.ToLower(text), strings.ToUpper(text)})
	}
	return given
}

func main() {
	in := bufio.NewReader(os.Stdin)
	out := bufio.NewWriter(os.Stdout)
	defer out.Flush()
	for {
		line, err := in.ReadBytes('\n')
		if len(line) > 0 {
			var asked question
			if err := json.Unmarshal(line, &asked); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			text, _ := json.Marshal(answered(asked))
			out.Write(append(text, '\n'))
		}
		if err != nil {
			return
		}
		if in.Buffered() == 0 {
			out.Flush()
		}
	}
}
